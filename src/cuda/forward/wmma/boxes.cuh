#pragma once

#include "cuda/ptx/tma.cuh"
#include "cuda/tile/box_source.cuh"
#include "cuda/tile/swizzle.cuh"

// Rows that come by TMA, for kernels of compute capability 9.0 and later.
namespace dlattn::wmma {

// See TensorBoxes; of all_segments() where `whole_segments`.
struct TensorMaps {
  ptx::TensorMap q, k, v;
  bool whole_segments;
};

// By one thread: has kRows rows of `source`, from `row` on, brought to `smem`. Their bytes, those
// of all kColumns columns, are expected at `mbarrier`. What the tensor does not have becomes zeros.
template <int kColumns, int kRows>
__device__ __forceinline__ void load_rows(ptx::SmemAddress smem, const ptx::TensorMap& map,
                                          bool whole_segments, ptx::SmemAddress mbarrier,
                                          const tile::StridedBoxes& source, int row) {
  using Rows = tile::SwizzledRows<kColumns, kRows>;
  if (whole_segments) {
    ptx::tma_load(smem, map, mbarrier, {0, row, 0, source.head}, source.batch);
    return;
  }
#pragma unroll
  for (int s = 0; s < Rows::kSegments; ++s) {
    source.load(smem + s * Rows::kSegmentStep, map, mbarrier, s * Rows::kSegmentBytes / 2, row);
  }
}

}  // namespace dlattn::wmma
