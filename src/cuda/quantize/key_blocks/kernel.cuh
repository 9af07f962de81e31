#pragma once

// k and v in 8 bits, or q, as core/quantized.h and core/rounding.h define them, to the same bits as
// the CPU backend. Of k and v it runs after shift_kernel (shift.cuh), whose means it subtracts.
//
// Two thread blocks for each block of keys of a head, which share a scale: one for k, one for v. A
// thread holds 16 columns of 2 rows until the largest magnitude is known, k's as fp32 and rotated,
// v's as they were read. A row lies in neighbouring lanes, so that the rotation is additions in
// registers and 2 or 3 steps of shuffles. Each number is read once and written once, by accesses of
// 16 bytes where rows are aligned so.
// Shared memory: the largest magnitude in each warp.
// Barriers: one __syncthreads, after which all threads know the scale.

#include "cuda/ptx/convert.cuh"
#include "cuda/quantize/key_blocks/rotate.cuh"
#include "cuda/quantize/key_blocks/shift.cuh"

namespace dlattn::quantize::key_blocks {

// Where a thread's numbers stand in its block of keys: kThreadRows rows, so many apart.
template <int kColumns, int kBlockN>
struct ThreadTile {
  static constexpr int kLanes = kColumns / kThreadColumns;  // of a row
  static constexpr int kStep = kBlockN / kThreadRows;

  int num_rows;  // of the block: fewer at the end of a sequence
  int lane = static_cast<int>(threadIdx.x) % kLanes;
  int first_row = static_cast<int>(threadIdx.x) / kLanes;

  __device__ __forceinline__ int row(int r) const { return first_row + r * kStep; }
  __device__ __forceinline__ bool in_use(int r) const { return row(r) < num_rows; }
  __device__ __forceinline__ int column(int c) const { return lane * kThreadColumns + c; }
};

constexpr int kThreadChunks = kThreadColumns / kChunk;
template <typename T>
using Rows = tile::Vec<T, kChunk>[kThreadRows][kThreadChunks];

// A thread's numbers of the block that begins at row n; zeros where there are none.
template <bool kWhole, typename T, typename Tile>
__device__ __forceinline__ void load_rows(const Tile& tile, const tile::RowSource<T>& from, int n,
                                          std::int64_t columns, Rows<T>& to) {
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const T* const row = from.row(std::int64_t{n} + tile.row(r));
    const int in_use = tile.in_use(r) ? static_cast<int>(columns) : 0;
#pragma unroll
    for (int i = 0; i < kThreadChunks; ++i)
      to[r][i] = load_chunk<kWhole>(row, tile.column(i * kChunk), in_use);
  }
}

template <typename T>
__device__ __forceinline__ float number(const Rows<T>& rows, int r, int c) {
  return tile::to_float(rows[r][c / kChunk].x[c % kChunk]);
}

// Of what is to become e4m3 only finite numbers count.
template <bool kFiniteOnly>
__device__ __forceinline__ std::uint32_t larger(std::uint32_t largest, float x) {
  const std::uint32_t bits = magnitude_bits(x);
  return kFiniteOnly && bits >= kInfinityBits ? largest : max(largest, bits);
}

__device__ __forceinline__ std::uint32_t warp_max(std::uint32_t x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    x = max(x, __shfl_xor_sync(tile::kFullMask, x, offset));
  return x;
}

// Infinity becomes NaN, not the largest number.
__device__ __forceinline__ float before_e4m3(float x, const Rounding& rounding) {
  return magnitude_bits(x) < kInfinityBits ? x * rounding.inverse : float_of_bits(0x7fc00000u);
}

template <bool kToInt8>
__device__ __forceinline__ std::uint32_t round4(const float (&x)[4], const Rounding& rounding) {
  float y[4];
#pragma unroll
  for (int j = 0; j < 4; ++j)
    y[j] = kToInt8 ? x[j] * rounding.up * rounding.inverse : before_e4m3(x[j], rounding);
  return kToInt8 ? ptx::convert_s8x4(y[0], y[1], y[2], y[3])
                 : ptx::convert_e4m3x4(y[0], y[1], y[2], y[3]);
}

// The largest of what all threads of the block have.
template <int kNumWarps>
__device__ __forceinline__ std::uint32_t block_max(std::uint32_t x) {
  auto* const sLargest = reinterpret_cast<std::uint32_t*>(ptx::dynamic_smem());
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) sLargest[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) x = max(x, sLargest[w]);
  return x;
}

// One block of keys of one head; or of rows of q, which is k without a mean and without v.
template <typename T, Precision kPrecision, int kColumns, bool kQueries>
struct BlockQuantizer {
  static constexpr int kBlockN = block_rows(kPrecision, kColumns, kQueries);
  static constexpr int kNumWarps = num_threads(kColumns, kBlockN) / 32;
  static constexpr bool kInt8 = kPrecision == Precision::kInt8Fp8;

  const QuantizeParams& p;
  const Shape& shape;
  const Head& head;
  int n;  // the block's first key
  ThreadTile<kColumns, kBlockN> tile;

  __device__ __forceinline__ void quantize_k() const {
    Rows<T> rows;
    if (shape.whole_k) {
      load_rows<true>(tile, head.rows<T>(p.k), n, p.head_dim, rows);
    } else {
      load_rows<false>(tile, head.rows<T>(p.k), n, p.head_dim, rows);
    }
    float shift[kThreadColumns] = {};
    if constexpr (!kQueries)
      tile::load(shift, shape.to.k_shift + head.sequence * shape.to.shift_batch_stride +
                            head.head * shape.to.shift_head_stride + tile.column(0));
    const unsigned negated = negated_columns(tile.lane);
    float k[kThreadRows][kThreadColumns];
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      const float factor = rotation_factor<kColumns>(negated, c);
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r)
        k[r][c] = __fmul_rn(number<T>(rows, r, c) - shift[c], factor);
    }
    std::uint32_t largest = 0;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      rotate<kColumns>(k[r], tile.lane);
      if (!tile.in_use(r)) continue;
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c) largest = larger<!kInt8>(largest, k[r][c]);
    }
    largest = block_max<kNumWarps>(largest);
    store<kInt8>(kInt8 ? rounding_to_int8(largest) : rounding_to_e4m3(largest), shape.to.k,
                 shape.to.k_scale, [&](int r, int c) { return k[r][c]; });
  }

  __device__ __forceinline__ void quantize_v() const {
    Rows<T> v;
    if (shape.whole_v) {
      load_rows<true>(tile, head.rows<T>(p.v), n, p.head_dim_v, v);
    } else {
      load_rows<false>(tile, head.rows<T>(p.v), n, p.head_dim_v, v);
    }
    std::uint32_t largest = 0;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c) largest = larger<true>(largest, number<T>(v, r, c));
    }
    constexpr float kLimit = largest_value(kPrecision);
    store<false>(rounding_to_e4m3(block_max<kNumWarps>(largest), kLimit), shape.to.v,
                 shape.to.v_scale, [&](int r, int c) { return number<T>(v, r, c); });
  }

 private:
  // Stores the thread's numbers, x(r, c).
  template <bool kToInt8, typename Numbers>
  __device__ __forceinline__ void store(const Rounding& rounding, const std::uint8_t* to,
                                        const float* scales, Numbers x) const {
    const std::int64_t at = head.entry * shape.to.batch_stride + head.head * shape.to.head_stride +
                            (std::int64_t{head.start} + n) * kColumns;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      tile::Vec<std::uint32_t, 4> packed;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float four[4] = {x(r, 4 * w), x(r, 4 * w + 1), x(r, 4 * w + 2), x(r, 4 * w + 3)};
        packed.x[w] = round4<kToInt8>(four, rounding);
      }
      std::uint8_t* const row =
          const_cast<std::uint8_t*>(to) + at + tile.row(r) * kColumns + tile.column(0);
      if (tile.in_use(r)) *reinterpret_cast<tile::Vec<std::uint32_t, 4>*>(row) = packed;
    }
    if (threadIdx.x != 0) return;
    const std::int64_t first = p.cu_seqlens_k ? first_block(head.start, head.sequence, kBlockN) : 0;
    const_cast<float*>(scales)[head.entry * shape.to.scale_batch_stride +
                               head.head * shape.to.scale_head_stride + first + n / kBlockN] =
        rounding.scale;
  }
};

// Blocks of k and v alternate, as those of k wait for arithmetic and those of v for memory. Heads
// of a block of keys follow each other, as they do in the usual layout of k and v.
template <typename T, Precision kPrecision, int kColumns, bool kQueries>
__global__ void __launch_bounds__(num_threads(kColumns, block_rows(kPrecision, kColumns, kQueries)),
                                  blocks_per_sm(kColumns,
                                                block_rows(kPrecision, kColumns, kQueries)))
    kernel(const __grid_constant__ QuantizeParams params, const __grid_constant__ Shape shape) {
// The plan refuses devices that would run code for less.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  constexpr int kBlockN = block_rows(kPrecision, kColumns, kQueries);
  constexpr unsigned kParts = kQueries ? 1 : 2;
  const unsigned index = blockIdx.x / kParts;
  unsigned block = shape.heads.quotient(index);
  const unsigned head_idx = index - block * shape.heads.divisor();
  unsigned sequence = shape.blocks.quotient(block);
  if (!params.cu_seqlens_k) block -= sequence * shape.blocks.divisor();

  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  if (params.cu_seqlens_k) sequence = sequence_of_block(params, kBlockN, block);
  const Head head(params, static_cast<int>(sequence), static_cast<int>(head_idx));
  // Before the sequence's first block it wraps.
  if (params.cu_seqlens_k)
    block -= static_cast<unsigned>(first_block(head.start, head.sequence, kBlockN));
  if (block >= static_cast<unsigned>((head.count + kBlockN - 1) / kBlockN)) return;
  const int n = static_cast<int>(block) * kBlockN;
  const BlockQuantizer<T, kPrecision, kColumns, kQueries> quantizer{
      params, shape, head, n, {min(kBlockN, head.count - n)}};
  if (blockIdx.x % kParts == 0) {
    quantizer.quantize_k();
  } else {
    quantizer.quantize_v();
  }
#endif
}

}  // namespace dlattn::quantize::key_blocks
