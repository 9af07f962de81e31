#pragma once

#include "cuda/forward/scalar/kernel.cuh"
#include "cuda/launch.cuh"

namespace dlattn::scalar {

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, void* stream) {
  using T = cuda::Element<dtype>;
  constexpr int kMaxSmem = tile_config(sizeof(T), kTile, tile::kMostKeys).smem_bytes;
  cuda::launch_kernel<kernel<T, kTile>, kMaxSmem>(cuda::DeviceGuard(params.device.index, "scalar"),
                                                  plan.grid, plan.num_warps * 32, plan.smem_bytes,
                                                  stream, params, make_launch_shape(params, plan));
}

}  // namespace dlattn::scalar
