#pragma once

#include "cuda/launch.cuh"
#include "cuda/sm90/kernel.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::sm90 {

template <DType dtype, int kTile, Terms kTerms>
void launch_kernel(const AttentionParams& params, const Plan& plan, void* stream) {
  const TensorBoxes boxes = tensor_boxes(params, kTile);
  const Launch launch = {cuda::encode_tensor_map(boxes.q, dtype),
                         cuda::encode_tensor_map(boxes.k, dtype),
                         cuda::encode_tensor_map(boxes.v, dtype),
                         cuda::encode_tensor_map(boxes.out, dtype),
                         num_works(params, kTile),
                         score_params(params, kTile),
                         cuda::encode_tensor_map(boxes.bias, dtype),
                         cuda::encode_tensor_map(boxes.mask, dtype)};
  cuda::launch_kernel<kernel<cuda::Element<dtype>, kTile, kTerms>>(
      "sm90", params.device.index, plan.grid, plan.num_warps * 32, plan.smem_bytes, stream, params,
      make_launch_shape(params, plan), launch);
}

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, void* stream) {
  switch (terms_of(params)) {
    case Terms::kNone:
      return launch_kernel<dtype, kTile, Terms::kNone>(params, plan, stream);
    case Terms::kComputed:
      return launch_kernel<dtype, kTile, Terms::kComputed>(params, plan, stream);
    case Terms::kLoaded:
      return launch_kernel<dtype, kTile, Terms::kLoaded>(params, plan, stream);
  }
}

}  // namespace dlattn::sm90
