#pragma once

#include "cuda/forward/sm90/boxes.h"
#include "cuda/forward/sm90/setup.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/varlen_scheduler.cuh"

// Where the rows of a work tile are for TMA.
namespace dlattn::sm90 {

// Where a box's rows are, as the tensor maps count them (boxes.h).
struct BoxRows {
  int row, batch;
};

// From the sequence's row `first` on, as far as row `end`; `start`: the sequence's first row of a
// pack's.
template <bool kVarlen>
__device__ __forceinline__ BoxRows box_rows(const tile::SequenceTile& item, int start, int end,
                                            int first) {
  if constexpr (!kVarlen) return {first, item.batch};
  return {static_cast<int>(tile::kPackEnd) - (end - first), start + end};
}

// Moves a box between the tensor and its place in shared memory.
template <bool kVarlen>
__device__ __forceinline__ void load_box(ptx::SmemAddress to, const ptx::TensorMap& map,
                                         ptx::SmemAddress mbarrier, int column, BoxRows rows,
                                         int head) {
  const ptx::BoxAt at = {column, rows.row, head, rows.batch};
  if constexpr (kVarlen) {
    ptx::tma_load(to, map, mbarrier, at, static_cast<int>(tile::kPackEnd));
  } else {
    ptx::tma_load(to, map, mbarrier, at);
  }
}
template <bool kVarlen>
__device__ __forceinline__ void store_box(const ptx::TensorMap& map, ptx::SmemAddress from,
                                          int column, BoxRows rows, int head) {
  const ptx::BoxAt at = {column, rows.row, head, rows.batch};
  if constexpr (kVarlen) {
    ptx::tma_store(map, from, at, static_cast<int>(tile::kPackEnd));
  } else {
    ptx::tma_store(map, from, at);
  }
}

}  // namespace dlattn::sm90
