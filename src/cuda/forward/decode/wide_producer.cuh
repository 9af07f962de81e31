#pragma once

#include "cuda/forward/decode/producer.cuh"

// The copies of a block with wide heads: slices of K and V into a ring of stages, which all warps
// share. Where V is K's first columns, a stage has K alone, and is both.
namespace dlattn::decode {

// `KV`: the type of elements of K and V.
template <typename KV, int kVariant>
struct WideProducer {
  static constexpr Shape kShape = shape_of(kWideTile, kVariant, sizeof(KV));
  static constexpr WideSmemMap kMap = wide_smem_map(kShape);
  static constexpr int kSlice = kShape.slice;
  static constexpr int kRingBytes = kMap.parts;
  static constexpr int kOfChunk = 16 / static_cast<int>(sizeof(KV));  // elements
  // As ldmatrix sees them: of 16-bit elements.
  using Rows = tile::SwizzledRows<kWideTile* static_cast<int>(sizeof(KV)) / 2>;
  static constexpr int kSegmentElements = Rows::kChunks * kOfChunk;
  // Eight lanes, or with 8-bit keys four, copy a segment of a row at a time, a warp of four rows or
  // of eight. Warps that have the same rows take turns.
  static constexpr int kRowsOfWarp = 32 / Rows::kChunks;
  static constexpr int kRowWarps = kSlice / kRowsOfWarp;
  static constexpr int kTurns = num_warps(kShape) / kRowWarps;
  static_assert(num_warps(kShape) % kRowWarps == 0 && kSegmentElements == 64);

  const AttentionParams& params;
  const DecodeShape& shape;
  const Segment& segment;  // a reference: no registers of its own
  const ptx::SmemAddress stages;
  const int begin, end;  // keys that a row of the row block sees
  // Without pages: the entry of the batch or the cache, and its row of key 0.
  int entry = 0, first_row = 0;

  __device__ __forceinline__ WideProducer(const AttentionParams& params, const DecodeShape& shape,
                                          const Segment& segment, const tile::Range& visible)
      : params(params),
        shape(shape),
        segment(segment),
        stages(ptx::smem_address(ptx::dynamic_smem())),
        begin(visible.begin),
        end(visible.end) {
    if (params.page_table.data) return;
    if (params.cu_seqlens_k) {
      first_row = tile::key_rows(params, segment.sequence).start;
    } else {
      entry = entry_of(params, segment.sequence);
    }
  }

  __device__ __forceinline__ int key(int i) const { return (segment.tile + i) * kSlice; }
  // This thread's row of a slice.
  __device__ __forceinline__ static int row() {
    const int thread = static_cast<int>(threadIdx.x);
    return thread / 32 % kRowWarps * kRowsOfWarp + thread % 32 / Rows::kChunks;
  }
  __device__ __forceinline__ bool is_seen(int i) const {
    const int n = key(i) + row();
    return i < segment.count && n >= begin && n < end;
  }

  // The page of this thread's key of slice i, as Producer::page(); without pages the entry.
  __device__ __forceinline__ int page(int i) const {
    if (!params.page_table.data) return entry;
    if (!is_seen(i)) return 0;
    const unsigned at = shape.page_size.quotient(static_cast<unsigned>(key(i) + row()));
    const std::int32_t* const pages =
        params.page_table.data + segment.sequence * params.page_table.batch_stride;
    return min(max(pages[at], 0), static_cast<int>(params.num_pages) - 1);
  }

  // Slice i to the stage at byte `stage`, if there is such a slice. Rows that nobody sees, and
  // columns that there are not, are filled with zeros.
  __device__ __forceinline__ void start(int i, int stage, int page) const {
    if (i < segment.count) {
      const bool seen = is_seen(i);
      copy(stages + stage, params.k, i, page, seen ? static_cast<int>(params.head_dim) : 0);
      if (!shape.latent) {
        copy(stages + stage + kMap.tensor, params.v, i, page,
             seen ? static_cast<int>(params.head_dim_v) : 0);
      }
    }
    ptx::cp_async_commit();
  }

 private:
  // This thread's part of a row of K or V, the first `columns` of which exist.
  __device__ __forceinline__ void copy(ptx::SmemAddress to, const TensorView& x, int i, int page,
                                       int columns) const {
    const int thread = static_cast<int>(threadIdx.x), chunk = thread % Rows::kChunks;
    const KV* from = static_cast<const KV*>(x.data);
    if (columns > 0) {
      const int n = key(i) + row();
      const int at = params.page_table.data
                         ? static_cast<int>(shape.page_size.remainder(static_cast<unsigned>(n)))
                         : first_row + n;
      from += page * x.batch_stride + segment.head_kv * x.head_stride + at * x.row_stride;
    }
    to += Rows::offset(row(), chunk);
    const int turn = thread / 32 / kRowWarps;
#pragma unroll
    for (int s = 0; s < Rows::kSegments; s += kTurns) {
      const int piece = s + turn, column = piece * kSegmentElements + chunk * kOfChunk;
      if (kTurns > 1 && piece >= Rows::kSegments) break;
      const bool exists = column < columns;
      ptx::cp_async<16>(to + piece * Rows::kSegmentBytes, from + (exists ? column : 0), exists);
    }
  }
};

}  // namespace dlattn::decode
