#pragma once

#include "core/operations/tasks.h"
#include "cuda/launch.cuh"
#include "cuda/reduce/partial_sums/kernel.cuh"

namespace dlattn::reduce::partial_sums {

template <DType dtype, int>
void launch(const ReduceTask& task, const Plan& plan, const Launch& launch, void* stream) {
  const BackwardParams& params = task;
  cuda::launch_kernel<reduce_kernel<cuda::Element<dtype>>>(
      cuda::DeviceGuard(params.forward.device.index, "backward"), launch.grid, kNumThreads,
      launch.smem_bytes, stream, params, make_shape(params, plan.parts_per_head));
}

}  // namespace dlattn::reduce::partial_sums
