#pragma once

// dK and dV, and in the fast mode a block's part of dQ: a block owns block_n keys of one KV head
// and walks the queries that see them, block_m at a time, of one query head of the group after the
// other. Warps have their keys to themselves (WarpKeys) or, where accumulators of both gradients
// take more registers than a thread has, share them (SharedKeys, LargeKeys). dS is left in shared
// memory: operand a of dQ = dS K, which all warps share and add to global memory. Shared memory:
// KeySmem.

#include <type_traits>

#include "cuda/backward/wmma/large_keys.cuh"
#include "cuda/backward/wmma/shared_keys.cuh"
#include "cuda/backward/wmma/warp_keys.cuh"
#include "cuda/ptx/grid_dependency.cuh"

namespace dlattn::backward_wmma {

template <typename Block>
__device__ __forceinline__ void run_keys(const BackwardParams& params, const Shape& shape) {
  const tile::WorkTile work = tile::scheduled_tile(shape, blockIdx.x);
  ptx::wait_for_grids_ahead();
  if (blockIdx.x >= shape.num_blocks) return;
  const typename Block::Base::Walk walk(params.forward, shape, work, Block::kBlockN);
  if (walk.n0 >= walk.seq.rows_k || !walk.any()) walk.clear_slope_parts();
  if (walk.n0 >= walk.seq.rows_k) return;
  Block(params, shape, walk).run();
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(num_threads(kHeadDim, kKeys), key_tile(kHeadDim).blocks_per_sm)
    keys_kernel(const __grid_constant__ BackwardParams params,
                const __grid_constant__ Shape shape) {
  run_keys<std::conditional_t<key_tile(kHeadDim).sharers == 1, WarpKeys<T, kHeadDim>,
                              SharedKeys<T, kHeadDim>>>(params, shape);
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    large_kernel(const __grid_constant__ BackwardParams params,
                 const __grid_constant__ Shape shape) {
  run_keys<LargeKeys<T, kHeadDim>>(params, shape);
}

}  // namespace dlattn::backward_wmma
