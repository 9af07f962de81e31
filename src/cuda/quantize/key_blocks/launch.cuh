#pragma once

#include "cuda/launch.cuh"
#include "cuda/quantize/key_blocks/kernel.cuh"

namespace dlattn::quantize::key_blocks {

template <DType dtype, int kColumns>
void launch(const QuantizeParams& params, const Plan& plan, void* stream) {
  constexpr Precision kPrecision = dtype == DType::kInt8 ? Precision::kInt8Fp8 : Precision::kFp8;
  const cuda::DeviceGuard guard(params.device.index, "quantize_kv");
  const Shape shape = make_shape(params);
  const auto launch_of = [&](auto element) {
    using T = decltype(element);
    cuda::launch_kernel<shift_kernel<T, kColumns>>(
        guard, params.batch_size * params.num_heads_kv, num_shift_threads(kColumns),
        shift_smem_bytes(kColumns), stream, params, shape);
    cuda::launch_kernel<kernel<T, kPrecision, kColumns>>(guard, plan.grid, plan.num_warps * 32,
                                                         plan.smem_bytes, stream, params, shape);
  };
  if (params.k.dtype == DType::kFloat16) return launch_of(cuda::Element<DType::kFloat16>());
  launch_of(cuda::Element<DType::kBFloat16>());
}

}  // namespace dlattn::quantize::key_blocks
