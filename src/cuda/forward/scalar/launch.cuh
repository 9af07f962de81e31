#pragma once

#include "cuda/forward/scalar/kernel.cuh"
#include "cuda/forward/scalar/shape.h"
#include "cuda/launch.cuh"

namespace dlattn::scalar {

template <typename T, int kTile, bool kCache>
void launch_kernel(const AttentionParams& params, const Plan& plan, void* stream) {
  constexpr int kMaxSmem = tile_config(sizeof(T), kTile, tile::kMostKeys).smem_bytes;
  cuda::launch_kernel<kernel<T, kTile, kCache>, kMaxSmem>(
      cuda::DeviceGuard(params.device.index, "scalar"), plan.grid, plan.num_warps * 32,
      plan.smem_bytes, stream, params, make_shape(params, plan));
}

// `dtype`: of q, or that of an 8-bit cache.
template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch&, void* stream) {
  if constexpr (dtype == DType::kInt8 || dtype == DType::kFloat8E4M3) {
    if (params.q.dtype == DType::kFloat16)
      return launch_kernel<half, kTile, true>(params, plan, stream);
    launch_kernel<__nv_bfloat16, kTile, true>(params, plan, stream);
  } else {
    using T = cuda::Element<dtype>;
    if (is_cache(params)) return launch_kernel<T, kTile, true>(params, plan, stream);
    launch_kernel<T, kTile, false>(params, plan, stream);
  }
}

}  // namespace dlattn::scalar
