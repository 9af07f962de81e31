#pragma once

#include <type_traits>

#include "cuda/backward/wmma/bias.cuh"
#include "cuda/backward/wmma/convert.cuh"
#include "cuda/backward/wmma/keys.cuh"
#include "cuda/backward/wmma/queries.cuh"
#include "cuda/backward/wmma/shape.h"
#include "cuda/launch.cuh"

namespace dlattn::backward_wmma {

template <typename T, int kTile>
constexpr auto kernel_of(int kernel) {
  if (kernel == kKeys) return keys_kernel<T, kTile>;
  if constexpr (kTile > 64) {
    if (kernel == kLarge) return large_kernel<T, kTile>;
  }
  if (kernel == kQueries) return queries_kernel<T, kTile>;
  return kernel == kConvert ? convert_kernel<T, kTile> : bias_kernel<T, kTile>;
}

template <DType dtype, int kTile>
void launch(const BackwardParams& params, const Plan& plan, const dlattn::Launch& launch,
            void* stream) {
  const Shape shape = planned_shape(params, plan, static_cast<Kernel>(launch.variant), kTile);
  const cuda::DeviceGuard device(params.forward.device.index, "backward");
  const auto launch_as = [&](auto kernel) {
    constexpr auto kKernel = kernel_of<cuda::Element<dtype>, kTile>(kernel);
    cuda::launch_kernel<kKernel>(device, launch.grid, num_threads(kTile, kernel), launch.smem_bytes,
                                 stream, params, shape);
  };
  switch (launch.variant) {
    case kKeys:
      return launch_as(std::integral_constant<int, kKeys>());
    case kQueries:
      return launch_as(std::integral_constant<int, kQueries>());
    case kConvert:
      return launch_as(std::integral_constant<int, kConvert>());
    case kLarge:
      if constexpr (kTile > 64) return launch_as(std::integral_constant<int, kLarge>());
      return;
    default:
      return launch_as(std::integral_constant<int, kBias>());
  }
}

}  // namespace dlattn::backward_wmma
