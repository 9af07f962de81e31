#pragma once

#include "cuda/plan/tensor_box.h"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/cache_source.cuh"
#include "cuda/tile/mask.cuh"

// Where TMA finds the rows of one head of a sequence, in tensors that plan/tensor_box.h describes.
// A caller that loads or stores a box names a row of the sequence and a column.
namespace dlattn::tile {

// Fixed lengths: a sequence is a batch entry.
struct StridedBoxes {
  int head, batch;

  __device__ __forceinline__ void load(ptx::SmemAddress to, const ptx::TensorMap& map,
                                       ptx::SmemAddress mbarrier, int column, int row) const {
    ptx::tma_load(to, map, mbarrier, {column, row, head, batch});
  }
  // To both blocks of a cluster of two.
  __device__ __forceinline__ void load_to_pair(ptx::SmemAddress to, const ptx::TensorMap& map,
                                               ptx::SmemAddress mbarrier, int column,
                                               int row) const {
    ptx::tma_load_to_blocks(to, map, mbarrier, {column, row, head, batch}, 3);
  }
  __device__ __forceinline__ void store(const ptx::TensorMap& map, ptx::SmemAddress from,
                                        int column, int row) const {
    ptx::tma_store(map, from, {column, row, head, batch});
  }
};

// Varlen: `length` rows from `start` on, of a tensor described by varlen_box(). A box of none of
// them is zeros.
struct VarlenBoxes {
  int head, start, length;

  __device__ __forceinline__ void load(ptx::SmemAddress to, const ptx::TensorMap& map,
                                       ptx::SmemAddress mbarrier, int column, int row) const {
    ptx::tma_load(to, map, mbarrier, at(column, row), kEnd);
  }
  __device__ __forceinline__ void load_to_pair(ptx::SmemAddress to, const ptx::TensorMap& map,
                                               ptx::SmemAddress mbarrier, int column,
                                               int row) const {
    ptx::tma_load_to_blocks(to, map, mbarrier, at(column, row), kEnd, 3);
  }
  __device__ __forceinline__ void store(const ptx::TensorMap& map, ptx::SmemAddress from,
                                        int column, int row) const {
    ptx::tma_store(map, from, at(column, row), kEnd);
  }

 private:
  static constexpr int kEnd = static_cast<int>(cuda::kVarlenEnd);

  __device__ __forceinline__ ptx::BoxAt at(int column, int row) const {
    return {column, kEnd - (length - row), head, start + length};
  }
};

// The box of keys `first` to first + rows - 1 of a cache, which are in one page: rows of a tensor
// described by page_box(), whose pages are `page_rows` rows apart. `seen`: the keys that a row sees
// by position. Of a box without them nothing is read, nor of the table; it is zeros, as are the
// rows behind the sequence's last key. It begins behind the pool's first row: before that row,
// where its end would lie otherwise, there may be no memory.
__device__ __forceinline__ VarlenBoxes page_box_of(const CacheSource& source, const Range& seen,
                                                   int head, int seqlen_k, int first, int rows,
                                                   int page_rows) {
  if (first >= seen.end || first + rows <= seen.begin) return {head, 1, 0};
  const CacheRow at = source.find(first);
  return {head, at.index * page_rows + at.row, min(rows, seqlen_k - first)};
}

// The boxes of a sequence whose rows of this tensor begin at `start` and are `length`.
template <bool kVarlen>
__device__ __forceinline__ auto box_source(int head, int batch, int start, int length) {
  if constexpr (kVarlen) {
    return VarlenBoxes{head, start, length};
  } else {
    return StridedBoxes{head, batch};
  }
}

// Calls use(boxes) with those of rows of fixed or of variable length.
template <typename Use>
__device__ __forceinline__ void with_boxes(bool varlen, int head, int batch, int start, int length,
                                           const Use& use) {
  if (varlen) {
    use(box_source<true>(head, batch, start, length));
  } else {
    use(box_source<false>(head, batch, start, length));
  }
}

// The same with those of a work tile's rows of q or out.
template <typename Tile, typename Use>
__device__ __forceinline__ void with_query_boxes(const AttentionParams& params, const Tile& work,
                                                 const Use& use) {
  with_boxes(params.cu_seqlens_q != nullptr, work.head, work.batch, work.start_q, work.seqlen_q,
             use);
}

}  // namespace dlattn::tile
