#pragma once

#include <cuda_fp16.h>  // before ptx/elements.cuh, with whose types nvcc makes other code of it

#include "core/problem/quantized.h"
#include "cuda/forward/wmma8/int8.cuh"
#include "cuda/forward/wmma8/kernel.cuh"
#include "cuda/launch.cuh"

namespace dlattn::wmma8 {

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch& launch,
            void* stream);

// Kernels of int8_fp8 are in the files of e4m3: with instructions of that a file is compiled once
// more (cuda/CMakeLists.txt), which those of int8_fp16 need not be.
extern template void launch<DType::kFloat8E4M3, 64>(const AttentionParams&, const Plan&,
                                                    const dlattn::Launch&, void*);
extern template void launch<DType::kFloat8E4M3, 128>(const AttentionParams&, const Plan&,
                                                     const dlattn::Launch&, void*);
extern template void launch<DType::kFloat8E4M3, 256>(const AttentionParams&, const Plan&,
                                                     const dlattn::Launch&, void*);

template <int kTile, Precision kPrecision, bool kGeneral>
void launch_int8(const AttentionParams& params, const Plan& plan, const LaunchShape& shape,
                 void* stream) {
  const QuantizedView view =
      view_of(quantized_layout(keys_of(params)), params.quantized_kv, params.cu_seqlens_k);
  if constexpr (!kGeneral || has_general(kTile, value_bytes(kPrecision))) {
    cuda::launch_kernel<int8_kernel<kTile, kGeneral, kPrecision>>(
        cuda::DeviceGuard(params.device.index, "wmma8"), plan.grid, plan.num_warps * 32,
        plan.smem_bytes, stream, params, shape, view);
  }
}

// `dtype`: of q, k and v, or of what those of 16 bits become.
template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch& launch,
            void* stream) {
  const LaunchShape shape = make_launch_shape(params, plan);
  const auto launch_as = [&](auto general) {
    if constexpr (dtype == DType::kInt8) {
      launch_int8<kTile, Precision::kInt8Fp16, general>(params, plan, shape, stream);
    } else if (params.precision == Precision::kInt8Fp8) {
      launch_int8<kTile, Precision::kInt8Fp8, general>(params, plan, shape, stream);
    } else {
      static_assert(dtype == DType::kFloat8E4M3);
      cuda::launch_kernel<kernel<kTile, general>>(cuda::DeviceGuard(params.device.index, "wmma8"),
                                                  plan.grid, plan.num_warps * 32, plan.smem_bytes,
                                                  stream, params, shape);
    }
  };
  if constexpr (dtype == DType::kInt8) {
    if (params.precision == Precision::kInt8Fp8)
      return wmma8::launch<DType::kFloat8E4M3, kTile>(params, plan, launch, stream);
  }
  if (is_general(params, plan.copy_bytes)) return launch_as(std::true_type());
  launch_as(std::false_type());
}

}  // namespace dlattn::wmma8
