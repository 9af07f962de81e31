#pragma once

#include "cuda/launch.cuh"
#include "cuda/wmma/kernel.cuh"

namespace dlattn::wmma {

template <DType dtype, int kTile, int kVariant>
void launch_variant(const AttentionParams& params, const Plan& plan, void* stream) {
  cuda::launch_kernel<kernel<cuda::Element<dtype>, kTile, kVariant>>(
      "wmma", params.device.index, plan.grid, plan.num_warps * 32, plan.smem_bytes, stream, params,
      make_launch_shape(params, plan));
}

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, void* stream) {
  if (plan.variant == kWide) {
    launch_variant<dtype, kTile, kWide>(params, plan, stream);
  } else {
    launch_variant<dtype, kTile, kNarrow>(params, plan, stream);
  }
}

}  // namespace dlattn::wmma
