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

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch& launch,
            void* stream);

// Kernels of q of 16 bits over a cache take its keys in 8 bits too. The files of those have them:
// with e4m3 a file is compiled once more (cuda/CMakeLists.txt).
extern template void launch<DType::kInt8, 64>(const AttentionParams&, const Plan&,
                                              const dlattn::Launch&, void*);
extern template void launch<DType::kInt8, 128>(const AttentionParams&, const Plan&,
                                               const dlattn::Launch&, void*);
extern template void launch<DType::kInt8, 256>(const AttentionParams&, const Plan&,
                                               const dlattn::Launch&, void*);

// `dtype`: of q, or that of an 8-bit cache.
template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch& launch,
            void* stream) {
  if constexpr (dtype == DType::kInt8 || dtype == DType::kFloat8E4M3) {
    if (params.q.dtype == DType::kFloat16)
      return launch_kernel<half, kTile, true>(params, plan, stream);
    launch_kernel<__nv_bfloat16, kTile, true>(params, plan, stream);
  } else {
    using T = cuda::Element<dtype>;
    if (is_cache(params)) {
      if constexpr (dtype == DType::kFloat32)
        return launch_kernel<T, kTile, true>(params, plan, stream);
      return scalar::launch<DType::kInt8, kTile>(params, plan, launch, stream);
    }
    launch_kernel<T, kTile, false>(params, plan, stream);
  }
}

}  // namespace dlattn::scalar
