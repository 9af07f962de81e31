#pragma once

// The kernel for all that the fast shapes leave out: softcap, ALiBi, bias and mask with any
// strides, rows of any alignment, head dims of any size.
//
// A block's work tile and its warps' rows are those of kernel.cuh, and tiles of keys are walked as
// there, in one body for edge tiles and others (GeneralConsumer). A lane's part of bias and mask
// starts on its way to shared memory a tile ahead. Up to head_dim 128 the row max is raised to that
// of a tile's scores before their probabilities. Above, where stages are handed over by mbarriers,
// it is raised from the sums of these, and the next tile is copied when this one's scores are no
// longer needed: a tile may be done again until then.
// K and V lie in shared memory in the order of RowsByLane, so that the accumulators of a lane hold
// neighbouring keys, of which bias and mask come by wide copies. Shared memory (SmemMap, bias and
// mask behind it) and barriers are those of kernel.cuh.

#include "cuda/forward/wmma/general_consumer.cuh"
#include "cuda/ptx/grid_dependency.cuh"

namespace dlattn::wmma {

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(tile_shape(kHeadDim, kGeneral).num_warps * 32,
                                  tile_shape(kHeadDim, kGeneral).blocks_per_sm)
    general_kernel(const __grid_constant__ AttentionParams params,
                   const __grid_constant__ LaunchShape shape) {
  using Consumer = GeneralConsumer<T, kHeadDim>;
  using WarpRows = typename Consumer::WarpRows;
  const tile::WorkTile work = tile::scheduled_tile(shape, blockIdx.x);
  ptx::wait_for_grids_ahead();
  const tile::Sequence<T> seq(params, shape, work);
  if (work.m_block * Consumer::kBlockM >= seq.seqlen_q) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  WarpRows rows(ptx::smem_address(ptx::dynamic_smem()) + Consumer::kMap.q + warp * WarpRows::kBytes,
                threadIdx.x % 32);
  Consumer(params, shape, work, seq).run(rows);
}

}  // namespace dlattn::wmma
