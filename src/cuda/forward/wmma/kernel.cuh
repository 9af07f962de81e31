#pragma once

// Attention with warp-level matrix instructions (mma.sync); scores and probabilities never leave
// registers.
//
// A thread block of 4 or 8 warps computes block_m query rows of one head; a warp owns 16 or 32 of
// them, start to end, with the unnormalised fp32 output in registers. Tiles of block_n keys are
// walked from the last to the first: so ragged and causal edges come first, as edge tiles, and the
// long loop after them has no mask and no bounds. (A window brings edge tiles at the end as well.)
// All threads copy K and V (Producer); each warp is a Consumer.
// Shared memory: SmemMap. Barriers, by the shape's handover (stages.cuh): the block's, once a tile,
// which publishes its K and V and frees the other stage; or for each stage an mbarrier "full" and
// one "empty", by which warps may be a tile apart.

#include "cuda/forward/wmma/consumer.cuh"
#include "cuda/ptx/grid_dependency.cuh"

namespace dlattn::wmma {

template <typename T, int kHeadDim, int kVariant, bool kPackGqa = false>
__global__ void __launch_bounds__(tile_shape(kHeadDim, kVariant).num_warps * 32,
                                  tile_shape(kHeadDim, kVariant).blocks_per_sm)
    kernel(const __grid_constant__ AttentionParams params,
           const __grid_constant__ LaunchShape shape) {
  static_assert(!kPackGqa || packs_heads(kVariant));
  using Consumer = wmma::Consumer<T, kHeadDim, kVariant, kPackGqa>;
  const tile::Rows<kPackGqa> tile_rows{shape};
  const tile::WorkTile work = tile_rows.work(blockIdx.x);
  ptx::wait_for_grids_ahead();
  const tile::Sequence<T> seq(params, shape, work);
  if (work.m_block * Consumer::kBlockM >= tile_rows.count(seq.seqlen_q)) return;
  using WarpRows = typename Consumer::WarpRows;
  WarpRows rows(ptx::smem_address(ptx::dynamic_smem()) + Consumer::kMap.q +
                    Consumer::row_group() * WarpRows::kBytes,
                threadIdx.x % 32);
  Consumer(params, shape, tile_rows, work, seq).run(rows);
}

}  // namespace dlattn::wmma
