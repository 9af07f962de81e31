#pragma once

// k and v in 8 bits, or q, as core/problem/quantized.h and core/problem/rounding.h define them, to
// the same bits as the CPU backend.
//
// A thread block does several blocks of keys of a head, which have a scale each: of each first v,
// then k. A thread holds 2 chunks of 2 rows: v's as they were read, k's as fp32 without the mean of
// sampled keys, which every thread block adds up itself, and rotated. A row lies in neighbouring
// lanes, so that the rotation is additions in registers and 2 or 3 steps of shuffles. While a
// thread computes, its own numbers of what comes next are on their way to shared memory; of rows
// that are not aligned it loads them when it needs them.
// Shared memory: Shared, below.
// Barriers: a __syncthreads after the list of what is to be done, one after means have been found,
// which is when a sequence begins, and one for each largest magnitude.

#include <cstring>
#include <type_traits>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/elements.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/permute.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/quantize/key_blocks/items.cuh"
#include "cuda/quantize/key_blocks/rotate.cuh"
#include "cuda/quantize/key_blocks/shift.cuh"

namespace dlattn::quantize::key_blocks {

using Rows = Chunk[kThreadRows][kThreadChunks];
using Numbers = float[kThreadRows][kThreadColumns];

// Where a thread's numbers stand in its block of keys: kThreadRows rows, so many apart, and
// kThreadChunks chunks of each.
template <int kColumns, int kBlockN>
struct ThreadTile {
  static constexpr int kLanes = kColumns / kThreadColumns;  // of a row
  static constexpr int kStep = kBlockN / kThreadRows;
  static constexpr int kChunkStep = kColumns / kThreadChunks;

  int lane = static_cast<int>(threadIdx.x) % kLanes;
  int first_row = static_cast<int>(threadIdx.x) / kLanes;

  __device__ __forceinline__ int row(int r) const { return first_row + r * kStep; }
  __device__ __forceinline__ int column(int i) const { return i * kChunkStep + lane * kChunk; }
};

template <int kColumns, int kBlockN>
struct Shared {
  static constexpr int kThreads = num_threads(kColumns, kBlockN);
  static constexpr int kLanes = kColumns / kThreadColumns;

  // A thread's chunks are its own: neighbours' lie side by side.
  __device__ __forceinline__ static Chunk* ahead(int r, int i) {
    return reinterpret_cast<Chunk*>(ptx::dynamic_smem()) + (r * kThreadChunks + i) * kThreads +
           threadIdx.x;
  }
  // The factor of k's columns, and the number that is added then.
  __device__ __forceinline__ static float* factors() {
    return reinterpret_cast<float*>(ptx::dynamic_smem() + kThreads * kThreadBytes);
  }
  __device__ __forceinline__ static float* shifts() { return factors() + kColumns; }
  // Where a column's are: 4 of a lane's lie beside 4 of the next lane's.
  __device__ __forceinline__ static int at(int column) {
    const int half = column / (kColumns / 2), in_half = column % (kColumns / 2);
    const int four = half * 2 + in_half / 4 % 2;
    return (four * kLanes + in_half / kChunk) * 4 + in_half % 4;
  }
  __device__ __forceinline__ static Item* items() {
    return reinterpret_cast<Item*>(shifts() + kColumns);
  }
  // Each warp has one for each step: threads may still read those of the step before.
  __device__ __forceinline__ static std::uint32_t* largest(int step) {
    return reinterpret_cast<std::uint32_t*>(items() + kMaxSteps) + step * (kThreads / 32);
  }
};

// Takes the place of infinities, for which the largest number of e4m3 would stand otherwise.
constexpr std::uint32_t kNan = 0x7fc00000u;

// The largest of a magnitude and those of a row: of what is to become integers NaN is the largest,
// of what is to become e4m3 only numbers count.
template <bool kToInt8>
__device__ __forceinline__ float larger(float largest, const float (&x)[kThreadColumns]) {
#pragma unroll
  for (int c = 0; c < kThreadColumns; ++c)
    largest = kToInt8 ? ptx::max_or_nan(largest, fabsf(x[c])) : fmaxf(largest, fabsf(x[c]));
  return largest;
}

// The largest magnitude of numbers of T, but for NaN.
template <typename T>
__device__ __forceinline__ float largest_of(const Rows& rows) {
  std::uint32_t pair = 0;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
    for (int i = 0; i < kThreadChunks; ++i) {
#pragma unroll
      for (int j = 0; j < kChunk / 2; ++j) pair = ptx::max_magnitudes<T>(pair, rows[r][i].x[j]);
    }
  }
  const Chunk chunk = {{pair}};
  return fmaxf(number<T>(chunk, 0), number<T>(chunk, 1));
}

// Two numbers of T, of which infinities become NaN.
template <typename T>
__device__ __forceinline__ std::uint32_t without_infinities(std::uint32_t pair) {
  constexpr std::uint32_t kInfinity = std::is_same_v<T, half> ? 0x7C00u : 0x7F80u;
  const std::uint32_t low = (pair & 0x7FFFu) == kInfinity ? 1u : 0u;
  const std::uint32_t high = (pair >> 16 & 0x7FFFu) == kInfinity ? 1u << 16 : 0u;
  return pair | low | high;
}

// Four numbers of at most 127 and a little in magnitude to the nearest integers, even ones of two.
__device__ __forceinline__ std::uint32_t round_to_int8(const float (&x)[4]) {
  // Beside so large a number the last bit of a float counts ones.
  constexpr float kLarge = 0x1.8p23f;
  std::uint32_t bits[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) bits[j] = bits_of(__fadd_rn(x[j], kLarge));
  return ptx::permute_bytes<0x5410>(ptx::permute_bytes<0x0040>(bits[0], bits[1]),
                                    ptx::permute_bytes<0x0040>(bits[2], bits[3]));
}

// The blocks of one thread block.
template <typename T, Precision kPrecision, int kColumns, bool kQueries>
struct BlockQuantizer {
  static constexpr int kBlockN = block_rows(kPrecision, kColumns, kQueries);
  static constexpr int kParts = num_parts(kQueries);
  static constexpr int kNumWarps = num_threads(kColumns, kBlockN) / 32;
  static constexpr bool kInt8 = multiplies_integers(kPrecision);
  static_assert(kNumWarps * kSampledColumns >= kColumns);
  static_assert(kNumWarps * 32 >= kColumns && kNumWarps <= 32);
  using Smem = Shared<kColumns, kBlockN>;
  static_assert(sizeof(Item) == kItemBytes);

  const QuantizeParams& p;
  const Shape& shape;
  int head;
  unsigned first;  // the thread block's first item
  ThreadTile<kColumns, kBlockN> tile;

  __device__ __forceinline__ void run() const {
    set_up();
    __syncthreads();
    int step = next_step(-1), sampled = -1;  // the sequence whose means are in shared memory
    if (step == shape.steps) return;
    copy_ahead(step);
#pragma unroll 1
    while (step < shape.steps) {
      // No mean is needed if the thread block has nothing but v of the sequence.
      const int sequence = Smem::items()[step].sequence;
      if (!kQueries && sequence != sampled && (of_k(step) || step + 1 < shape.steps)) {
        find_means(step);
        sampled = sequence;
        __syncthreads();
      }
      Rows rows;
      load(rows);
      const int next = next_step(step);
      if (next < shape.steps) copy_ahead(next);
      if (of_k(step)) {
        quantize_k(step, rows);
      } else {
        quantize_v(step, rows);
      }
      step = next;
    }
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }
  // In a block of keys k comes last.
  __device__ __forceinline__ bool of_k(int step) const {
    return (first + static_cast<unsigned>(step)) % kParts == kParts - 1;
  }
  __device__ __forceinline__ bool in_use(int rows, int r) const { return tile.row(r) < rows; }
  // The next one that has something to do.
  __device__ __forceinline__ int next_step(int step) const {
    do {
      ++step;
    } while (step < shape.steps && Smem::items()[step].rows == 0);
    return step;
  }

  // Items and factors to shared memory.
  __device__ __forceinline__ void set_up() const {
    if (thread() < kColumns) {
      Smem::factors()[Smem::at(thread())] = rotation_factor<kColumns>(thread());
      if (kQueries) Smem::shifts()[Smem::at(thread())] = 0.0f;
    }
    if (thread() >= shape.steps) return;
    const unsigned index = first + static_cast<unsigned>(thread());
    if (index >= shape.num_items) {
      Smem::items()[thread()].rows = 0;
      return;
    }
    const Item item =
        item_of_block(p, shape, kColumns, kBlockN, index / kParts, head, of_k(thread()));
    Smem::items()[thread()] = item;
    // A sequence without keys has a mean too.
    if (!kQueries && item.n == 0 && item.count == 0 && of_k(thread())) {
#pragma unroll 1
      for (int c = 0; c < kColumns; ++c) store_mean(item.sequence, c, 0.0f);
    }
  }

  // A thread's numbers of a block to its place in shared memory: zeros where there are none. Those
  // of rows that are not aligned it waits for.
  __device__ __forceinline__ void copy_ahead(int step) const {
    const std::uint16_t* const from = Smem::items()[step].from;
    const int rows = Smem::items()[step].rows;
    const std::int64_t stride = of_k(step) ? p.k.row_stride : p.v.row_stride;
    const int columns = static_cast<int>(of_k(step) ? p.head_dim : p.head_dim_v);
    const std::uint16_t* const first_row = from + tile.first_row * stride + tile.column(0);
    if (of_k(step) ? shape.whole_k : shape.whole_v) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        const std::uint16_t* const row = first_row + r * tile.kStep * stride;
#pragma unroll
        for (int i = 0; i < kThreadChunks; ++i) {
          ptx::cp_async<16>(Smem::ahead(r, i), row + i * tile.kChunkStep,
                            in_use(rows, r) && tile.column(i) < columns);
        }
      }
      ptx::cp_async_commit();
      return;
    }
#pragma unroll 1
    for (int r = 0; r < kThreadRows; ++r) {
      const std::uint16_t* const row = first_row + r * tile.kStep * stride;
#pragma unroll 1
      for (int i = 0; i < kThreadChunks; ++i) {
        *Smem::ahead(r, i) = load_chunk<false>(row + i * tile.kChunkStep,
                                               in_use(rows, r) ? columns - tile.column(i) : 0);
      }
    }
  }

  __device__ __forceinline__ static void load(Rows& to) {
    ptx::cp_async_wait<0>();
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
      for (int i = 0; i < kThreadChunks; ++i) to[r][i] = *Smem::ahead(r, i);
    }
  }

  // The means of the step's sequence, to shared memory; and to where they are kept by the thread
  // block that does its first block.
  __device__ __forceinline__ void find_means(int step) const {
    const int lane = thread() % 32;
    const int column = thread() / 32 * kSampledColumns + lane % 2 * kChunk;
    if (column >= kColumns) return;  // true of all lanes of a warp, or of none
    const Item& item = Smem::items()[step];
    const std::int64_t entry = p.cu_seqlens_k ? 0 : item.sequence;
    const std::uint16_t* const from = static_cast<const std::uint16_t*>(p.k.data) +
                                      entry * p.k.batch_stride + item.start * p.k.row_stride +
                                      head * p.k.head_stride + column;
    const int columns = static_cast<int>(p.head_dim) - column;
    float sums[kChunk] = {};
    if (shape.whole_k) {
      add_sampled<true, T>(from, p.k.row_stride, columns, item.count, lane, sums);
    } else {
      add_sampled<false, T>(from, p.k.row_stride, columns, item.count, lane, sums);
    }
    const float mean = mean_of_sum(sum_of_lanes(sums, lane), min(item.count, kSampledKeys));
    if (lane & 2) return;  // another lane has the same
    const int own = column + column_of_lane(lane);
    Smem::shifts()[Smem::at(own)] = mean == 0.0f ? 0.0f : -mean * rotation_factor<kColumns>(own);
    if (item.n == 0) store_mean(item.sequence, own, mean);
  }

  __device__ __forceinline__ void store_mean(int sequence, int column, float mean) const {
    const_cast<float*>(shape.to.k_shift)[sequence * shape.to.shift_batch_stride +
                                         head * shape.to.shift_head_stride + column] = mean;
  }

  __device__ __forceinline__ void quantize_k(int step, const Rows& rows) const {
    Numbers k;
#pragma unroll
    for (int c = 0; c < kThreadColumns; c += 4) {
      // core/problem/quantized.h says why one FMA is enough.
      float factor[4], shift[4];
      const int at = (c / 4 * tile.kLanes + tile.lane) * 4;
      tile::load(factor, Smem::factors() + at);
      tile::load(shift, Smem::shifts() + at);
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          k[r][c + j] = fmaf(number<T>(rows[r][c / kChunk], c % kChunk + j), factor[j], shift[j]);
      }
    }
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) rotate<kColumns>(k[r], tile.lane);
    const std::uint32_t largest = block_max(step, largest_of_rows(step, k));
    if (thread() == 0) {
      *Smem::items()[step].scale =
          kInt8 ? rounding_to_int8(largest).scale : rounding_by_power(largest).scale;
    }
    const Rounding rounding = kInt8 ? rounding_to_int8(largest) : rounding_by_power(largest);
    if (kInt8 && rounding.up != 1.0f) {  // of very small numbers alone, or where not all are finite
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
        for (int c = 0; c < kThreadColumns; ++c) k[r][c] = __fmul_rn(k[r][c], rounding.up);
      }
    }
    store<kInt8>(step, rounding, [&](int r, int c) { return k[r][c]; });
  }

  __device__ __forceinline__ std::uint32_t largest_of_rows(int step, Numbers& k) const {
    const int rows = Smem::items()[step].rows;
    float largest = 0.0f;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      if (in_use(rows, r)) largest = larger<kInt8>(largest, k[r]);
    }
    if (kInt8 || largest != INFINITY) return bits_of(largest);
    largest = 0.0f;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c)
        k[r][c] = fabsf(k[r][c]) == INFINITY ? float_of_bits(kNan) : k[r][c];
      if (in_use(rows, r)) largest = larger<false>(largest, k[r]);
    }
    return bits_of(largest);
  }

  __device__ __forceinline__ void quantize_v(int step, Rows& rows) const {
    float largest = largest_of<T>(rows);
    if (largest == INFINITY) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
        for (int i = 0; i < kThreadChunks; ++i) {
#pragma unroll
          for (std::uint32_t& pair : rows[r][i].x) pair = without_infinities<T>(pair);
        }
      }
      largest = largest_of<T>(rows);
    }
    constexpr float kLimit = largest_value(kPrecision);
    const Rounding rounding = rounding_by_power(block_max(step, bits_of(largest)), kLimit);
    if (thread() == 0) *Smem::items()[step].scale = rounding.scale;
    const auto get = [&](int r, int c) { return number<T>(rows[r][c / kChunk], c % kChunk); };
    if constexpr (value_bytes(kPrecision) == 2)
      store_half(step, rounding, get);
    else
      store<false>(step, rounding, get);
  }

  // Stores v's numbers, x(r, c), in fp16. A chunk is a half of 16 columns, the pairs of which
  // value_place() puts in two places.
  template <typename GetNumber>
  __device__ __forceinline__ void store_half(int step, const Rounding& rounding,
                                             GetNumber x) const {
    const int rows = Smem::items()[step].rows;
    std::uint8_t* const to = Smem::items()[step].to;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
      for (int i = 0; i < kThreadChunks; ++i) {
        tile::Vec<std::uint32_t, 2> packed[2];
#pragma unroll
        for (int pair = 0; pair < kChunk / 2; ++pair) {
          const int c = i * kChunk + 2 * pair;
          const half2 two = __floats2half2_rn(__fmul_rn(x(r, c), rounding.inverse),
                                              __fmul_rn(x(r, c + 1), rounding.inverse));
          memcpy(&packed[pair % 2].x[pair / 2], &two, sizeof two);
        }
        if (!in_use(rows, r)) continue;
        const int place = value_place(kPrecision, tile.column(i));
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          auto* const at = to + (tile.row(r) * kColumns + place + 8 * part) * 2;
          *reinterpret_cast<tile::Vec<std::uint32_t, 2>*>(at) = packed[part];
        }
      }
    }
  }

  // The largest of what all threads of the block have.
  __device__ __forceinline__ static std::uint32_t block_max(int step, std::uint32_t x) {
    const int lane = thread() % 32;
    std::uint32_t* const largest = Smem::largest(step);
    x = __reduce_max_sync(tile::kFullMask, x);
    if (lane == 0) largest[thread() / 32] = x;
    __syncthreads();
    return __reduce_max_sync(tile::kFullMask, lane < kNumWarps ? largest[lane] : 0u);
  }

  // Stores the thread's numbers, x(r, c).
  template <bool kToInt8, typename GetNumber>
  __device__ __forceinline__ void store(int step, const Rounding& rounding, GetNumber x) const {
    const int rows = Smem::items()[step].rows;
    std::uint8_t* const to = Smem::items()[step].to + (tile.first_row * kColumns + tile.column(0));
    // Numbers that are not finite are stored as the integer 0.
    const std::uint32_t kept = kToInt8 && rounding.up == 0.0f ? 0u : ~0u;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
      for (int i = 0; i < kThreadChunks; ++i) {
        tile::Vec<std::uint32_t, 2> packed;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          float y[4];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            y[j] = __fmul_rn(x(r, i * kChunk + 4 * w + j), rounding.inverse);
          packed.x[w] =
              kToInt8 ? round_to_int8(y) & kept : ptx::convert_e4m3x4(y[0], y[1], y[2], y[3]);
        }
        const int at = r * tile.kStep * kColumns + i * tile.kChunkStep;
        if (in_use(rows, r)) *reinterpret_cast<tile::Vec<std::uint32_t, 2>*>(to + at) = packed;
      }
    }
  }
};

// Thread blocks of different heads of the same keys follow each other, as heads do in the usual
// layout of k and v.
template <typename T, Precision kPrecision, int kColumns, bool kQueries>
__global__ void __launch_bounds__(num_threads(kColumns, block_rows(kPrecision, kColumns, kQueries)),
                                  blocks_per_sm(kColumns,
                                                block_rows(kPrecision, kColumns, kQueries)))
    kernel(const __grid_constant__ QuantizeParams params, const __grid_constant__ Shape shape) {
// The plan refuses devices that would run code for less.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  constexpr bool kHasCode = true;
#else
  constexpr bool kHasCode = min_capability(kPrecision) == 80;
#endif
  if constexpr (kHasCode) {
    ptx::wait_for_grids_ahead();
    ptx::let_next_grid_start();
    const unsigned walk = shape.heads.quotient(blockIdx.x);
    const int head = static_cast<int>(blockIdx.x - walk * shape.heads.divisor());
    const unsigned first = walk * static_cast<unsigned>(shape.steps);
    BlockQuantizer<T, kPrecision, kColumns, kQueries>{params, shape, head, first, {}}.run();
  }
}

}  // namespace dlattn::quantize::key_blocks
