#pragma once

#include "cuda/launch.cuh"
#include "cuda/quantize/key_blocks/kernel.cuh"

namespace dlattn::quantize::key_blocks {

template <DType dtype, int kColumns>
void launch(const QuantizeTask& task, const Plan&, void* stream) {
  constexpr Precision kPrecision = dtype == DType::kInt8 ? Precision::kInt8Fp8 : Precision::kFp8;
  const cuda::DeviceGuard guard(task.device.index, "quantize_kv");
  const Grids grids = grids_of(task);
  const auto launch_kernel = [&](auto element, auto queries, std::int64_t grid,
                                 const QuantizeParams& params, const Shape& shape) {
    constexpr int kRows = block_rows(kPrecision, kColumns, queries);
    cuda::launch_kernel<kernel<decltype(element), kPrecision, kColumns, queries>>(
        guard, grid, num_threads(kColumns, kRows), smem_bytes(kColumns, kRows), stream, params,
        shape);
  };
  const auto launch_of = [&](auto element) {
    using T = decltype(element);
    if constexpr (kPrecision == Precision::kFp8) {
      if (grids.queries > 0) {
        launch_kernel(element, std::true_type(), grids.queries, queries_as_keys(task),
                      make_query_shape(task));
      }
    }
    if (grids.keys == 0) return;
    const QuantizeParams& params = task;
    const Shape shape = make_shape(params);
    cuda::launch_kernel<shift_kernel<T, kColumns>>(
        guard, params.batch_size * params.num_heads_kv, num_shift_threads(kColumns),
        shift_smem_bytes(kColumns), stream, params, shape);
    launch_kernel(element, std::false_type(), grids.keys, params, shape);
  };
  const DType dtype_in = grids.keys > 0 ? task.k.dtype : task.q.dtype;
  if (dtype_in == DType::kFloat16) return launch_of(cuda::Element<DType::kFloat16>());
  launch_of(cuda::Element<DType::kBFloat16>());
}

}  // namespace dlattn::quantize::key_blocks
