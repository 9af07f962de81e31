#pragma once

#include "cuda/launch.cuh"
#include "cuda/sm90/kernel.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::sm90 {

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, void* stream) {
  const TensorBoxes boxes = tensor_boxes(params, kTile);
  const Launch launch = {cuda::encode_tensor_map(boxes.q, dtype),
                         cuda::encode_tensor_map(boxes.k, dtype),
                         cuda::encode_tensor_map(boxes.v, dtype),
                         cuda::encode_tensor_map(boxes.out, dtype), num_works(params, kTile)};
  cuda::launch_kernel<kernel<cuda::Element<dtype>, kTile>>(
      "sm90", params.device.index, plan.grid, plan.num_warps * 32, plan.smem_bytes, stream, params,
      make_launch_shape(params, plan), launch);
}

}  // namespace dlattn::sm90
