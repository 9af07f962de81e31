#pragma once

#include "cuda/forward/wmma_qk/kernel.cuh"
#include "cuda/launch.cuh"

namespace dlattn::wmma_qk {

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch&, void* stream) {
  constexpr int kMaxSmem = tile_config(kTile, tile::kMostKeys).smem_bytes;
  cuda::launch_kernel<kernel<cuda::Element<dtype>, kTile>, kMaxSmem>(
      cuda::DeviceGuard(params.device.index, "wmma_qk"), plan.grid, plan.num_warps * 32,
      plan.smem_bytes, stream, params, make_launch_shape(params, plan));
}

}  // namespace dlattn::wmma_qk
