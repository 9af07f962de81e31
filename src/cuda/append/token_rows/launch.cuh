#pragma once

#include "cuda/append/token_rows/kernel.cuh"
#include "cuda/launch.cuh"

namespace dlattn::append::token_rows {

template <DType dtype, int>
void launch(const AppendParams& params, const Plan&, const Launch& launch, void* stream) {
  const Shape shape = make_shape(params);
  cuda::launch_kernel<kernel<cuda::Element<dtype>>>(
      cuda::DeviceGuard(params.device.index, "append_kv"), launch.grid, kNumThreads,
      launch.smem_bytes, stream, params, shape);
}

}  // namespace dlattn::append::token_rows
