#pragma once

#include "cuda/ptx/tma.cuh"
#include "cuda/tile/swizzle.cuh"

// Rows that the copy engine brings, for kernels of compute capability 9.0 and later.
namespace dlattn::wmma {

// See TensorBoxes; of all_segments() where `whole_segments`.
struct TensorMaps {
  ptx::TensorMap q, k, v;
  bool whole_segments;
};

// By one thread: has kRows rows of a head, from `row` on, brought to `smem`. Their bytes, those of
// all kColumns columns, are expected at `mbarrier`. What the tensor does not have becomes zeros.
template <int kColumns, int kRows>
__device__ __forceinline__ void load_rows(ptx::SmemAddress smem, const ptx::TensorMap& map,
                                          bool whole_segments, ptx::SmemAddress mbarrier, int row,
                                          int head, int batch) {
  using Rows = tile::SwizzledRows<kColumns, kRows>;
  if (whole_segments) {
    ptx::tma_load(smem, map, mbarrier, {0, row, 0, head}, batch);
    return;
  }
#pragma unroll
  for (int s = 0; s < Rows::kSegments; ++s) {
    ptx::tma_load(smem + s * Rows::kSegmentStep, map, mbarrier,
                  {s * Rows::kSegmentBytes / 2, row, head, batch});
  }
}

}  // namespace dlattn::wmma
