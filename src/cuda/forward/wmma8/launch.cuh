#pragma once

#include "core/problem/quantized.h"
#include "cuda/forward/wmma8/int8.cuh"
#include "cuda/forward/wmma8/kernel.cuh"
#include "cuda/launch.cuh"

namespace dlattn::wmma8 {

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch&, void* stream) {
  const LaunchShape shape = make_launch_shape(params, plan);
  const auto launch_as = [&](auto general) {
    const cuda::DeviceGuard device(params.device.index, "wmma8");
    const int threads = plan.num_warps * 32;
    if constexpr (dtype == DType::kInt8) {
      const QuantizedView view =
          view_of(quantized_layout(keys_of(params)), params.quantized_kv, params.cu_seqlens_k);
      const auto launch_in = [&](auto precision) {
        if constexpr (!general || has_general(kTile, value_bytes(precision))) {
          cuda::launch_kernel<int8_kernel<kTile, general, precision>>(
              device, plan.grid, threads, plan.smem_bytes, stream, params, shape, view);
        }
      };
      if (params.precision == Precision::kInt8Fp16)
        return launch_in(std::integral_constant<Precision, Precision::kInt8Fp16>());
      launch_in(std::integral_constant<Precision, Precision::kInt8Fp8>());
    } else {
      static_assert(dtype == DType::kFloat8E4M3);
      cuda::launch_kernel<kernel<kTile, general>>(device, plan.grid, threads, plan.smem_bytes,
                                                  stream, params, shape);
    }
  };
  if (is_general(params, plan.copy_bytes)) return launch_as(std::true_type());
  launch_as(std::false_type());
}

}  // namespace dlattn::wmma8
