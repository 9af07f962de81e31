#pragma once

#include "cuda/launch.cuh"
#include "cuda/quantize/key_blocks/kernel.cuh"

namespace dlattn::quantize::key_blocks {

template <Precision kPrecision, int kColumns, bool kQueries>
void launch_tensors(const QuantizeTask& task, const Launch& launch, void* stream) {
  const auto launch_as = [&](auto element, const QuantizeParams& params, const Shape& shape) {
    cuda::launch_kernel<kernel<decltype(element), kPrecision, kColumns, kQueries>>(
        cuda::DeviceGuard(task.device.index, "quantize_kv"), launch.grid, launch.num_warps * 32,
        launch.smem_bytes, stream, params, shape);
  };
  const auto launch_of = [&](auto element) {
    if constexpr (kQueries) {
      launch_as(element, queries_as_keys(task),
                make_query_shape(task, grid_of_queries(task).steps));
    } else {
      launch_as(element, task, make_shape(task, grid_of_keys(task).steps));
    }
  };
  const DType dtype_in = kQueries ? task.q.dtype : task.k.dtype;
  if (dtype_in == DType::kFloat16) return launch_of(cuda::Element<DType::kFloat16>());
  launch_of(cuda::Element<DType::kBFloat16>());
}

template <DType dtype, int kColumns>
void launch(const QuantizeTask& task, const Plan&, const Launch& launch, void* stream) {
  if constexpr (dtype != DType::kInt8) {
    if (task.queries) return launch_tensors<Precision::kFp8, kColumns, true>(task, launch, stream);
    launch_tensors<Precision::kFp8, kColumns, false>(task, launch, stream);
  } else if (task.precision == Precision::kInt8Fp16) {
    launch_tensors<Precision::kInt8Fp16, kColumns, false>(task, launch, stream);
  } else {
    launch_tensors<Precision::kInt8Fp8, kColumns, false>(task, launch, stream);
  }
}

}  // namespace dlattn::quantize::key_blocks
