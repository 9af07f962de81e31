#pragma once

#include "core/operations/tasks.h"
#include "cuda/delta/row_blocks/kernel.cuh"
#include "cuda/launch.cuh"

namespace dlattn::delta::row_blocks {

template <DType dtype, int>
void launch(const DeltaTask& task, const Plan& plan, const Launch& launch, void* stream) {
  const BackwardParams& params = task;
  cuda::launch_kernel<delta_kernel<cuda::Element<dtype>>>(
      cuda::DeviceGuard(params.forward.device.index, "backward"), launch.grid, kNumThreads,
      launch.smem_bytes, stream, params, make_shape(params, plan));
}

}  // namespace dlattn::delta::row_blocks
