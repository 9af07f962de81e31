#pragma once

// The kernel of kernel.cuh for keys in a cache: pages of a pool, or entries. Two warps of the
// producer copy K and V page by page (cached_producer.cuh); consumers are those of varlen problems,
// which the producer tells the lengths of each work tile.

#include "cuda/forward/sm90/cached_producer.cuh"
#include "cuda/forward/sm90/consumer.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/registers.cuh"

namespace dlattn::sm90 {

template <typename T, int kHeadDim, int kHeadDimV, Variant kVariant>
__global__ void __launch_bounds__(num_threads(tile_shape(kHeadDim, kHeadDimV, kVariant)), 1)
    cached_kernel(const __grid_constant__ AttentionParams params,
                  const __grid_constant__ LaunchShape shape,
                  const __grid_constant__ KernelArgs args) {
  static_assert(reads_caches(kHeadDim, kVariant));
  constexpr TileShape kShape = cached_shape(kHeadDim, kHeadDimV, kVariant);
  const Shared<kHeadDim, kHeadDimV, kVariant> shared(ptx::smem_address(ptx::dynamic_smem()));
  shared.init();
  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::lower_registers<kShape.producer_registers>();
    using Producer = CachedProducer<kHeadDim, kHeadDimV, kVariant>;
    if (threadIdx.x < Producer::kWarps * 32) Producer{params, shape, args, shared}.run();
  } else {
    ptx::raise_registers<kShape.consumer_registers>();
    // The same in all lanes, and by this the compiler knows.
    const int warpgroup =
        __shfl_sync(tile::kFullMask, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    Consumer<T, true, kHeadDim, kHeadDimV, kVariant, true>(params, shape, args, shared,
                                                           warpgroup - 1)
        .run();
  }
}

}  // namespace dlattn::sm90
