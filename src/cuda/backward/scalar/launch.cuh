#pragma once

#include <type_traits>

#include "cuda/backward/scalar/bias.cuh"
#include "cuda/backward/scalar/kernel.cuh"
#include "cuda/launch.cuh"

namespace dlattn::backward_scalar {

template <int kTile>
constexpr auto kernel_of(int kernel) {
  if (kernel == kKeys) return keys_kernel<kTile>;
  return kernel == kQueries ? queries_kernel<kTile> : bias_kernel<kNumThreads>;
}

// Kernels take tensors of any dtype, so that instances of all dtypes have the same ones.
template <DType, int kTile>
void launch(const BackwardParams& params, const Plan& plan, const dlattn::Launch& launch,
            void* stream) {
  const Shape shape = make_shape(params, plan, launch.variant);
  const cuda::DeviceGuard device(params.forward.device.index, "backward");
  const auto launch_as = [&](auto number) {
    constexpr auto kKernel = kernel_of<kTile>(number);
    cuda::launch_kernel<kKernel>(device, launch.grid, kNumThreads, launch.smem_bytes, stream,
                                 params, shape);
  };
  if (launch.variant == kKeys) {
    launch_as(std::integral_constant<int, kKeys>());
  } else if (launch.variant == kQueries) {
    launch_as(std::integral_constant<int, kQueries>());
  } else {
    launch_as(std::integral_constant<int, kBias>());
  }
}

}  // namespace dlattn::backward_scalar
