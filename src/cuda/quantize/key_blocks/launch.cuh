#pragma once

#include "cuda/launch.cuh"
#include "cuda/quantize/key_blocks/kernel.cuh"

namespace dlattn::quantize::key_blocks {

template <Precision kPrecision, int kColumns>
void launch_in(const QuantizeTask& task, void* stream) {
  const cuda::DeviceGuard guard(task.device.index, "quantize_kv");
  const Grid keys = grid_of_keys(task), rows_of_q = grid_of_queries(task);
  const auto launch_kernel = [&](auto element, auto queries, const Grid& grid,
                                 const QuantizeParams& params, const Shape& shape) {
    constexpr int kRows = block_rows(kPrecision, kColumns, queries);
    cuda::launch_kernel<kernel<decltype(element), kPrecision, kColumns, queries>>(
        guard, grid.blocks, num_threads(kColumns, kRows), smem_bytes(kColumns, kRows), stream,
        params, shape);
  };
  const auto launch_of = [&](auto element) {
    if constexpr (kPrecision == Precision::kFp8) {
      if (rows_of_q.blocks > 0) {
        launch_kernel(element, std::true_type(), rows_of_q, queries_as_keys(task),
                      make_query_shape(task, rows_of_q.steps));
      }
    }
    if (keys.blocks > 0)
      launch_kernel(element, std::false_type(), keys, task, make_shape(task, keys.steps));
  };
  const DType dtype_in = keys.blocks > 0 ? task.k.dtype : task.q.dtype;
  if (dtype_in == DType::kFloat16) return launch_of(cuda::Element<DType::kFloat16>());
  launch_of(cuda::Element<DType::kBFloat16>());
}

template <DType dtype, int kColumns>
void launch(const QuantizeTask& task, const Plan&, void* stream) {
  if constexpr (dtype != DType::kInt8) {
    launch_in<Precision::kFp8, kColumns>(task, stream);
  } else if (task.precision == Precision::kInt8Fp16) {
    launch_in<Precision::kInt8Fp16, kColumns>(task, stream);
  } else {
    launch_in<Precision::kInt8Fp8, kColumns>(task, stream);
  }
}

}  // namespace dlattn::quantize::key_blocks
