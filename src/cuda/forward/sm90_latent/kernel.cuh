#pragma once

// Decoding over latents on Hopper (compute capability 9.0): K and V are one memory, V the first
// columns of K.
//
// A thread block takes segments as `decode` does (tile/key_parts/schedule.cuh): 64 rows of a KV
// head, those of all its query heads, with consecutive tiles of 64 keys. One warp of the producer's
// warpgroup copies the tiles by TMA into two stages (Producer); a tile is copied once and
// multiplied twice. Two consumer warpgroups share the rows: each computes the scores and
// probabilities of every other tile, and half of the columns of out of all tiles (Consumer). Sums
// over all tiles of the row block are the result, others go to the workspace, where the combine
// kernel adds them up. Shared memory: SmemMap, in swizzled tiles. Barriers: setup.cuh.
//
// Where a KV head has up to 32 rows, narrow_kernel has them all: one consumer, whose products are
// transposed (NarrowConsumer). Shared memory: NarrowMap. Barriers: narrow_setup.cuh.

#include "cuda/forward/sm90_latent/consumer.cuh"
#include "cuda/forward/sm90_latent/narrow_consumer.cuh"
#include "cuda/forward/sm90_latent/narrow_producer.cuh"
#include "cuda/forward/sm90_latent/producer.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/tile/key_parts/combine.cuh"

namespace dlattn::sm90_latent {

template <typename T>
__global__ void __launch_bounds__(kNumThreads, 1)
    kernel(const __grid_constant__ AttentionParams params,
           const __grid_constant__ DecodeShape shape, const __grid_constant__ KernelArgs args) {
  const Shared shared{ptx::smem_address(ptx::dynamic_smem())};
  shared.init(shape);
  begin_access();
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::lower_registers<kProducerRegisters>();
    if (threadIdx.x < 32) Producer<WideStages>{params, shape, args, {shared}}.run();
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    // The same in all lanes, and by this the compiler knows.
    const int warpgroup =
        __shfl_sync(tile::kFullMask, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    Consumer<T>(params, shape, shared, warpgroup - 1).run();
  }
  // The cluster's other block copies to this one, and arrives at its barriers, until its own end.
  ptx::cluster_leave();
}

// The same of a narrow shape.
template <typename T, int kRows>
__global__ void __launch_bounds__(kNarrowThreads, 1)
    narrow_kernel(const __grid_constant__ AttentionParams params,
                  const __grid_constant__ DecodeShape shape,
                  const __grid_constant__ KernelArgs args) {
  const Ring<kRows> ring{ptx::smem_address(ptx::dynamic_smem())};
  ring.init();
  begin_access();
  if (threadIdx.x < 32) {
    Producer<NarrowStages<kRows>>{params, shape, args, {ring}}.run();
  } else if (threadIdx.x >= kWarpgroupThreads) {
    NarrowConsumer<T, kRows>(params, shape, ring).run();
  }
  ptx::cluster_leave();
}

template <typename T>
__global__ void __launch_bounds__(kCombineThreads, kResidentCombineBlocks)
    combine_kernel(const __grid_constant__ AttentionParams params,
                   const __grid_constant__ DecodeShape shape,
                   const __grid_constant__ CombineGrid grid) {
  combine_row_block<T, kWideTile, kBlockM, kBlockN, kElementBytes>(params, shape, grid.slices);
}

}  // namespace dlattn::sm90_latent
