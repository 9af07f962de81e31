#pragma once

#include "cuda/ptx/tma.cuh"
#include "cuda/tile/box_source.cuh"
#include "cuda/tile/swizzle.cuh"

// Loads of rows by TMA, for kernels of compute capability 9.0 and later.
namespace dlattn::wmma {

// The maps of TensorBoxes, or those of all_segments() where `full_segments`.
struct TensorMaps {
  ptx::TensorMap q, k, v;
  bool full_segments;
};

// Loads kRows rows of `source`, from `row` on, to `smem`. One thread calls it. `mbarrier` expects
// the bytes of all kColumns columns. Elements outside of the tensor become zeros.
template <int kColumns, int kRows>
__device__ __forceinline__ void load_rows(ptx::SmemAddress smem, const ptx::TensorMap& map,
                                          bool full_segments, ptx::SmemAddress mbarrier,
                                          const tile::StridedBoxes& source, int row) {
  using Rows = tile::SwizzledRows<kColumns, kRows>;
  if (full_segments) {
    ptx::tma_load(smem, map, mbarrier, {0, row, 0, source.head}, source.batch);
    return;
  }
#pragma unroll
  for (int s = 0; s < Rows::kSegments; ++s) {
    source.load(smem + s * Rows::kSegmentStep, map, mbarrier, s * Rows::kSegmentColumns, row);
  }
}

}  // namespace dlattn::wmma
