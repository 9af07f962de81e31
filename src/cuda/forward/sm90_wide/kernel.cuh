#pragma once

// Attention on Hopper (compute capability 9.0) for heads of 257 to 512 columns.
//
// A work tile is 128 query rows of one head, for a cluster of two thread blocks, each of which has
// 64 of the rows, two threads that copy (Producer) and two consumer warpgroups (Consumer): of tiles
// of 64 keys a consumer computes every other one's scores and probabilities, and half of the
// columns of out. Both blocks read the same keys at the same time: each copies half of K and V to
// both by multicast TMA. Tiles are walked from the last to the first. Shared memory: SmemMap, in
// swizzled blocks of 64 columns. Barriers: one mbarrier for Q, one "full" and one "empty" for each
// slot of the streams of K and V (Stream); named ones where consumers hand over probabilities.

#include "cuda/forward/sm90_wide/consumer.cuh"
#include "cuda/forward/sm90_wide/producer.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/registers.cuh"

namespace dlattn::sm90_wide {

template <typename T, int kTile>
__global__ void __launch_bounds__(kNumThreads, 1)
    kernel(const __grid_constant__ AttentionParams params,
           const __grid_constant__ LaunchShape shape, const __grid_constant__ KernelArgs args) {
  const Shared<kTile> shared{ptx::smem_address(ptx::dynamic_smem())};
  shared.init();
  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::lower_registers<kProducerRegisters>();
    const int consumer = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x % 32 == 0 && consumer < kConsumers)
      Producer<kTile>{params, shape, args, shared, consumer}.run();
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    // The same in all lanes, and by this the compiler knows.
    const int warpgroup =
        __shfl_sync(tile::kFullMask, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    Consumer<T, kTile>(params, shape, shared, warpgroup - 1).run();
  }
  // The other block arrives at this one's barriers as long as it empties slots.
  ptx::cluster_leave();
}

}  // namespace dlattn::sm90_wide
