#pragma once

// Attention of 8-bit elements with warp-level matrix instructions (mma.sync); scores and
// probabilities never leave registers.
//
// A thread block of 4 warps computes 64 query rows of one head. A warp owns 16 of them, start to
// end, with Q (up to head_dim 128) and the unnormalised fp32 output in registers. Tiles of 64 keys
// are walked from the last to the first. All threads copy Q, K and V by cp.async; K and V lie in
// shared memory as they do in global memory. P is rounded to e4m3 relative to the row's maximum so
// far, and the sum of a tile's products with V is added to the output in fp32.
// kGeneral: with softcap, or for rows that are not aligned to 16 bytes.
//
// Shared memory: SmemMap.
// Barriers: for each stage of K and V an mbarrier "full" and one "empty" (tile/stages.cuh).

#include "cuda/forward/wmma8/consumer.cuh"
#include "cuda/forward/wmma8/e4m3_inputs.cuh"

namespace dlattn::wmma8 {

template <int kHeadDim, bool kGeneral>
__global__ void __launch_bounds__(tile_shape(kHeadDim).num_warps * 32,
                                  blocks_per_sm(kHeadDim, kGeneral))
    kernel(const __grid_constant__ AttentionParams params,
           const __grid_constant__ LaunchShape shape) {
// The plan refuses devices that would run code for less.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  attend(E4m3Inputs<kHeadDim, kGeneral>{params, shape});
#endif
}

}  // namespace dlattn::wmma8
