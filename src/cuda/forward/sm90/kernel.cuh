#pragma once

// Attention on Hopper (compute capability 9.0): wgmma, TMA, mbarriers, warp specialisation.
//
// A thread block has a producer warpgroup, one thread of which starts all copies of Q, K and V, and
// 2 to 4 consumer warpgroups, each of which computes 64 query rows of one head from start to end,
// or with two groups of keys, for every other tile of these. It takes one work tile (block_m rows
// of a head) after the other; with two stages of Q the next one's copies run under this one's
// products. Tiles of block_n keys are walked from the last to the first: so ragged and causal edges
// come first, and the long loop after them has no mask. Shared memory: SmemMap, in swizzled tiles.
// Barriers: an mbarrier "full" and one "empty" for each stage of Q, K and V (Ring); named barriers
// for ping-pong scheduling and for each consumer's own threads (setup.cuh).

#include "cuda/forward/sm90/consumer.cuh"
#include "cuda/forward/sm90/producer.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/registers.cuh"

namespace dlattn::sm90 {

// kVarlen: of varlen problems, or, where a kernel serves both, of fixed lengths too.
template <typename T, int kHeadDim, int kHeadDimV, Variant kVariant, bool kVarlen>
__global__ void __launch_bounds__(num_threads(tile_shape(kHeadDim, kHeadDimV, kVariant)), 1)
    kernel(const __grid_constant__ AttentionParams params,
           const __grid_constant__ LaunchShape shape, const __grid_constant__ KernelArgs args) {
  static_assert(kVarlen || !serves_all_lengths(kVariant));
  constexpr TileShape kShape = tile_shape(kHeadDim, kHeadDimV, kVariant);
  const Shared<kHeadDim, kHeadDimV, kVariant> shared(ptx::smem_address(ptx::dynamic_smem()));
  shared.init();
  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::lower_registers<kShape.producer_registers>();
    if (threadIdx.x == 0) produce<kVarlen>(params, shape, args, shared);
    if constexpr (kVariant == Variant::kLoaded) {
      static_assert(kShape.num_consumers <= 3, "a warp of the producer's for each");
      const int consumer = static_cast<int>(threadIdx.x) / 32 - 1;
      if (threadIdx.x % 32 == 0 && consumer >= 0 && consumer < kShape.num_consumers)
        produce_bias_mask(params, shape, args, shared, consumer);
    }
  } else {
    ptx::raise_registers<kShape.consumer_registers>();
    // The same in all lanes, and by this the compiler knows.
    const int warpgroup =
        __shfl_sync(tile::kFullMask, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    Consumer<T, kVarlen, kHeadDim, kHeadDimV, kVariant, serves_all_lengths(kVariant)>(
        params, shape, args, shared, warpgroup - 1)
        .run();
  }
  // The other block arrives at this one's barriers as long as it empties stages.
  if constexpr (cluster_blocks(kVariant) > 1) ptx::cluster_leave();
}

}  // namespace dlattn::sm90
