#pragma once

#include "cuda/forward/sm90_wide/boxes.h"
#include "cuda/forward/sm90_wide/kernel.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::sm90_wide {

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch&, void* stream) {
  const cuda::DeviceGuard device(params.device.index, "sm90_wide");
  const TensorBoxes boxes = tensor_boxes(params);
  const KernelArgs args = {cuda::encode_tensor_map(device, boxes.q, dtype),
                           cuda::encode_tensor_map(device, boxes.k, dtype),
                           cuda::encode_tensor_map(device, boxes.v, dtype)};
  cuda::launch_clusters<kernel<cuda::Element<dtype>, kTile>>(
      device, plan.grid, plan.cluster_size, plan.num_warps * 32, plan.smem_bytes, stream, params,
      make_launch_shape(params, plan), args);
}

}  // namespace dlattn::sm90_wide
