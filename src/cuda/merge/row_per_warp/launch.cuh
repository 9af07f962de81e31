#pragma once

#include "cuda/launch.cuh"
#include "cuda/merge/row_per_warp/kernel.cuh"

namespace dlattn::merge::row_per_warp {

template <DType dtype, int>
void launch(const MergeParams& params, const Plan&, const Launch& launch, void* stream) {
  using T = cuda::Element<dtype>;
  cuda::launch_kernel<kernel<T>>(cuda::DeviceGuard(params.device.index, "merge_states"),
                                 launch.grid, kNumThreads, launch.smem_bytes, stream, params,
                                 rows_are_aligned(params, sizeof(T)));
}

}  // namespace dlattn::merge::row_per_warp
