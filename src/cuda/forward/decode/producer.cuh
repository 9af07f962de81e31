#pragma once

#include "cuda/forward/decode/traits.h"
#include "cuda/ptx/cp_async_once.cuh"
#include "cuda/tile/key_parts/schedule.cuh"
#include "cuda/tile/key_source.cuh"
#include "cuda/tile/swizzle.cuh"

// The copies of a group of warps: its slices of K and V, into its own stages.
namespace dlattn::decode {

// The entry of the batch, or of the cache, that has the keys of a sequence.
__device__ __forceinline__ int entry_of(const AttentionParams& p, int sequence) {
  const int last = max(static_cast<int>(p.cache_batch_size) - 1, 0);
  return p.cache_batch_idx ? min(max(p.cache_batch_idx[sequence], 0), last) : sequence;
}

// Rows from key 0 of a sequence on, or from page 0 of a pool. kAsked: kernels for pages serve keys
// without them too.
template <typename KV, bool kPaged, bool kAsked>
struct KeyRows : tile::KeySource<KV> {
  __device__ __forceinline__ KeyRows(const AttentionParams& p, int sequence, int head_kv)
      : tile::KeySource<KV>(p, head_kv) {
    if (is_paged(p)) return;
    if (p.cu_seqlens_k) {
      this->begin_at_row(tile::key_rows(p, sequence).start);
    } else {
      this->begin_at_batch(p, entry_of(p, sequence));
    }
  }
  __device__ __forceinline__ static bool is_paged(const AttentionParams& p) {
    return kPaged && (!kAsked || p.page_table.data);
  }
};

// `KV`: the type of elements of K and V.
template <typename KV, int kHeadDim, int kVariant, bool kPaged, bool kAsked>
struct Producer {
  static constexpr Shape kShape = shape_of(kHeadDim, kVariant, sizeof(KV));
  static constexpr SmemMap kMap = smem_map(kHeadDim, kShape);
  static constexpr int kBlockN = block_n(kShape);
  static constexpr int kSlice = kShape.slice;
  static constexpr int kStages = kShape.stages;
  static constexpr int kThreads = kShape.row_groups * 32;             // of a group
  static constexpr int kOfChunk = 16 / static_cast<int>(sizeof(KV));  // elements
  static constexpr int kChunks = kHeadDim / kOfChunk;                 // of 16 bytes, of a row
  static constexpr int kStep = kThreads / kChunks;  // rows that are copied at a time
  static constexpr int kSteps = kSlice / kStep;
  static constexpr int kStageBytes = 2 * kMap.tensor;
  static constexpr int kUnroll = kHeadDim > 128 ? 1 : 4;  // where registers are scarce, not at all
  // As ldmatrix sees them: of 16-bit elements.
  static constexpr int kColumns = kHeadDim * static_cast<int>(sizeof(KV)) / 2;
  // Keys as lines of L2 that are evicted first, as far as it has been measured.
  static constexpr bool kReadsOnce = kHeadDim == 128 && sizeof(KV) == 2;
  using Rows = tile::SwizzledRows<kColumns>;
  static_assert(kThreads % kChunks == 0 && kSlice % kStep == 0 && kSlice <= 32);

  const AttentionParams& params;
  const DecodeShape& shape;
  const KeyRows<KV, kPaged, kAsked> rows;
  const int& sequence;            // a reference: no register of its own
  const ptx::SmemAddress stages;  // the group's
  const int first_key;            // the group's first key of the segment
  const int count;                // slices
  const int begin, end;           // keys that a row of the row block sees
  const int first_row, chunk;     // this thread's, of a slice

  // `tile`, `count`: those of the segment.
  __device__ __forceinline__ Producer(const AttentionParams& params, const DecodeShape& shape,
                                      const Segment& segment, const tile::Range& visible)
      : params(params),
        shape(shape),
        rows(params, segment.sequence, segment.head_kv),
        sequence(segment.sequence),
        stages(ptx::smem_address(ptx::dynamic_smem()) + group() * kMap.group),
        first_key(segment.tile * kBlockN + group() * kSlice),
        count(segment.count),
        begin(visible.begin),
        end(visible.end),
        first_row(static_cast<int>(threadIdx.x) % kThreads / kChunks),
        chunk(static_cast<int>(threadIdx.x) % kThreads % kChunks) {}

  __device__ __forceinline__ static int group() { return static_cast<int>(threadIdx.x) / kThreads; }
  // The first key of the group's i-th slice.
  __device__ __forceinline__ int key(int i) const { return first_key + i * kBlockN; }

  // The page of the key of slice i that has the lane's number; to be asked for well before it is
  // used. Nothing is read of the table for keys that nobody sees. Entries may lie outside the pool,
  // and are clamped. Without a table all keys are in page 0.
  __device__ __forceinline__ int page(int i) const {
    if constexpr (kPaged) {
      const int lane = static_cast<int>(threadIdx.x) % 32, n = key(i) + lane;
      if (rows.is_paged(params) && lane < kSlice && i < count && n >= begin && n < end) {
        const unsigned at = shape.page_size.quotient(static_cast<unsigned>(n));
        const std::int32_t* const pages =
            params.page_table.data + sequence * params.page_table.batch_stride;
        return min(max(pages[at], 0), static_cast<int>(params.num_pages) - 1);
      }
    }
    return 0;
  }
  // Where its row lies in the pool.
  __device__ __forceinline__ std::int64_t offset(const TensorView& x, int i, int page) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const unsigned n = static_cast<unsigned>(key(i) + lane);
    return page * x.batch_stride + static_cast<int>(shape.page_size.remainder(n)) * x.row_stride;
  }

  // Slice i to the stage at byte `stage`, if there is such a slice. Rows that nobody sees are
  // filled with zeros: what lies there may be NaN, or not be there at all.
  __device__ __forceinline__ void start(int i, int stage, [[maybe_unused]] int page) const {
    if (i < count) {
      const int n0 = key(i);
      std::int64_t k_of_lane = 0, v_of_lane = 0;
      if constexpr (kPaged) {
        k_of_lane = offset(params.k, i, page);
        v_of_lane = offset(params.v, i, page);
      }
#pragma unroll kUnroll
      for (int s = 0; s < kSteps; ++s) {
        const int row = first_row + s * kStep, n = n0 + row;
        const bool seen = n >= begin && n < end;
        std::int64_t k_offset, v_offset;
        if constexpr (kPaged) {
          k_offset = __shfl_sync(tile::kFullMask, k_of_lane, row);
          v_offset = __shfl_sync(tile::kFullMask, v_of_lane, row);
        } else {
          k_offset = n * params.k.row_stride, v_offset = n * params.v.row_stride;
        }
        copy(stages + stage, rows.k.data, k_offset, row,
             seen && chunk * kOfChunk < params.head_dim);
        copy(stages + stage + kMap.tensor, rows.v.data, v_offset, row,
             seen && chunk * kOfChunk < params.head_dim_v);
      }
    }
    ptx::cp_async_commit();
  }

  // Asks for the first slice to be brought to L2, by sectors: by lines of 128 bytes it takes
  // longer.
  __device__ __forceinline__ void ask_for_first() const {
    constexpr int kSector = 32, kOfSector = kSector / static_cast<int>(sizeof(KV));
    constexpr int kOfRow = kHeadDim / kOfSector;
    const int lane = static_cast<int>(threadIdx.x) % 32, column = lane % kOfRow * kOfSector;
#pragma unroll 1
    for (int row = lane / kOfRow; row < kSlice; row += 32 / kOfRow) {
      const int n = first_key + row;
      if (n < begin || n >= end) continue;
      if (column < params.head_dim)
        ptx::prefetch_to_l2(rows.k.data + n * params.k.row_stride + column);
      if (column < params.head_dim_v)
        ptx::prefetch_to_l2(rows.v.data + n * params.v.row_stride + column);
    }
  }

 private:
  __device__ __forceinline__ void copy(ptx::SmemAddress to, const KV* from, std::int64_t offset,
                                       int row, bool valid) const {
    const KV* const at = from + (valid ? offset + chunk * kOfChunk : 0);
    if constexpr (kReadsOnce) {
      ptx::cp_async_once(to + Rows::offset(row, chunk), at, valid);
    } else {
      ptx::cp_async<16>(to + Rows::offset(row, chunk), at, valid);
    }
  }
};

}  // namespace dlattn::decode
