#pragma once

#include "cuda/forward/wmma8/kernel.cuh"
#include "cuda/launch.cuh"

namespace dlattn::wmma8 {

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, void* stream) {
  static_assert(dtype == DType::kFloat8E4M3);
  const auto launch_as = [&](auto general) {
    cuda::launch_kernel<kernel<kTile, general>>(cuda::DeviceGuard(params.device.index, "wmma8"),
                                                plan.grid, plan.num_warps * 32, plan.smem_bytes,
                                                stream, params, make_launch_shape(params, plan));
  };
  if constexpr (has_general(kTile)) {
    if (is_general(params.softcap, plan.copy_bytes)) return launch_as(std::true_type());
  }
  launch_as(std::false_type());
}

}  // namespace dlattn::wmma8
