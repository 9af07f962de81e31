#pragma once

#include "cuda/forward/wmma_halves/kernel.cuh"
#include "cuda/launch.cuh"

namespace dlattn::wmma_halves {

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch&, void* stream) {
  cuda::launch_kernel<kernel<cuda::Element<dtype>, kTile>>(
      cuda::DeviceGuard(params.device.index, "wmma_halves"), plan.grid, plan.num_warps * 32,
      plan.smem_bytes, stream, params, make_launch_shape(params, plan));
}

}  // namespace dlattn::wmma_halves
