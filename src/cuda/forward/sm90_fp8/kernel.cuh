#pragma once

// Attention of 8-bit inputs on Hopper (compute capability 9.0): wgmma of e4m3, TMA, mbarriers, warp
// specialisation. As sm90, but for V.
//
// A thread block has a producer warpgroup and two or three consumer warpgroups, each of which
// computes 64 query rows of one head from start to end. In the producer one thread starts all
// copies of Q, K and V, and three warps transpose V's tiles in shared memory. The block takes one
// work tile (block_m rows of a head) after the other and walks tiles of block_n keys from the last
// to the first. Shared memory: SmemMap, in swizzled tiles. Barriers: an mbarrier "full" and one
// "empty" for each stage of Q, K, V and transposed V (Ring).

#include "cuda/forward/sm90_fp8/consumer.cuh"
#include "cuda/forward/sm90_fp8/producer.cuh"
#include "cuda/forward/sm90_fp8/transpose.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/registers.cuh"

namespace dlattn::sm90_fp8 {

// kScaled: of 16-bit inputs that were quantised, each tile of which has a scale of its own. kGiven:
// with the caller's bias or mask, of fixed lengths; such a kernel is kScaled, and takes inputs of 8
// bits too.
template <int kHeadDim, bool kVarlen, bool kScaled, bool kGiven>
__global__ void __launch_bounds__(num_threads(tile_shape(kHeadDim)), 1)
    kernel(const __grid_constant__ AttentionParams params,
           const __grid_constant__ LaunchShape shape,
           const __grid_constant__ KernelArgsOf<kScaled> args) {
  constexpr TileShape kShape = tile_shape(kHeadDim);
  // From each of two consumers to the producer, which spills one otherwise.
  constexpr int kMovedRegisters = kGiven && kHeadDim == 128 ? 8 : 0;
  const Shared<kHeadDim> shared(ptx::smem_address(ptx::dynamic_smem()));
  shared.init();
  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  // The same in all lanes, and by this the compiler knows.
  const int warp = __shfl_sync(tile::kFullMask, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < kWarpgroupThreads / 32) {
    ptx::lower_registers<kShape.producer_registers + 2 * kMovedRegisters>();
    if (warp < kTransposers) {
      transpose_values<kVarlen>(params, shape, args, shared, warp);
    } else if (threadIdx.x % 32 == 0) {
      produce<kVarlen>(params, shape, args, shared);
    }
  } else {
    ptx::raise_registers<kShape.consumer_registers - kMovedRegisters>();
    Consumer<kVarlen, kHeadDim, kScaled, kGiven>(params, shape, args, shared, warp / 4 - 1).run();
  }
}

}  // namespace dlattn::sm90_fp8
