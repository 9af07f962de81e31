#pragma once

// As kernel.cuh, as a persistent kernel to which TMA brings Q, K and V.
//
// A block takes one work tile (block_m rows of a head) after the other, and each of its warps is a
// PersistentConsumer of its own rows. Copies of K and V run ahead of the products by half of the
// stages, from one work tile into the next, and a warp has its rows of the next work tile's Q
// brought when it has those of this one in registers: so a work tile's first tiles come while the
// one before is worked on. The first lane of each warp in turn starts the copy of a tile
// (PersistentProducer). Results go from registers to global memory.
// Shared memory: SmemMap. All barriers are mbarriers (PersistentShared), and the warp that is
// furthest behind never waits for another: what it waits for has been started, by itself or by
// warps further on.

#include "cuda/forward/wmma/persistent_consumer.cuh"
#include "cuda/ptx/grid_dependency.cuh"

namespace dlattn::wmma {

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(tile_shape(kHeadDim, kPersistent).num_warps * 32,
                                  tile_shape(kHeadDim, kPersistent).blocks_per_sm)
    persistent_kernel([[maybe_unused]] const __grid_constant__ AttentionParams params,
                      [[maybe_unused]] const __grid_constant__ LaunchShape shape,
                      [[maybe_unused]] const __grid_constant__ TensorMaps maps) {
// Devices of 12.0 and later have less shared memory than a block takes: the plan refuses them.
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
  const PersistentShared<T, kHeadDim> shared(ptx::smem_address(ptx::dynamic_smem()));
  shared.init();
  ptx::wait_for_grids_ahead();
  const PersistentTiles work_tiles(params, shape);
  const PersistentProducer<T, kHeadDim> producer{work_tiles, maps, shared};
  PersistentConsumer<T, kHeadDim>{params, shape, work_tiles, shared, producer}.run();
#endif
}

}  // namespace dlattn::wmma
