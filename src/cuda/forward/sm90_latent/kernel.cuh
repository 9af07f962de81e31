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
// transposed (NarrowConsumer), or two, by turns, and three warps that copy, where keys have 8 bits
// (narrow_consumers()). Shared memory: NarrowMap. Barriers: narrow_setup.cuh.

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

// The same of a narrow shape. With keys KV of 8 bits it serves q and out of either type.
template <typename T, int kRows, typename KV = T>
__global__ void __launch_bounds__(narrow_threads(kRows, sizeof(KV)), 1)
    narrow_kernel(const __grid_constant__ AttentionParams params,
                  const __grid_constant__ DecodeShape shape,
                  const __grid_constant__ KernelArgs args) {
  constexpr int kKeyBytes = static_cast<int>(sizeof(KV));
  const Ring<kRows, kKeyBytes> ring{ptx::smem_address(ptx::dynamic_smem())};
  ring.init();
  begin_access();
  constexpr bool kSeveral = narrow_consumers(kRows, kKeyBytes) > 1;
  if (threadIdx.x < kWarpgroupThreads) {
    if constexpr (kSeveral) ptx::lower_registers<kProducerRegisters>();
    using Stages = std::conditional_t<kKeyBytes == 1, ByteStages<kRows>, NarrowStages<kRows>>;
    if (threadIdx.x < Stages::kWarps * 32) Producer<Stages>{params, shape, args, {ring}}.run();
  } else {
    int consumer = 0;
    if constexpr (kSeveral) {
      ptx::raise_registers<kConsumerRegisters>();
      consumer =
          __shfl_sync(tile::kFullMask, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0) - 1;
    }
    NarrowConsumer<T, kRows, KV>(params, shape, ring, consumer).run();
  }
  ptx::cluster_leave();
}

template <typename T>
__global__ void __launch_bounds__(kCombineThreads, kResidentCombineBlocks)
    combine_kernel(const __grid_constant__ AttentionParams params,
                   const __grid_constant__ DecodeShape shape,
                   const __grid_constant__ CombineGrid grid) {
  // Where keys have 16 bits there is no factor of values, and it is 1.
  combine_row_block<T, kWideTile, kBlockM, kBlockN, 1>(params, shape, grid.slices);
}

}  // namespace dlattn::sm90_latent
