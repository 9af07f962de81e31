#pragma once

#include "cuda/forward/sm90/boxes.h"
#include "cuda/forward/sm90/kernel.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::sm90 {

template <DType dtype, int kHeadDim, int kHeadDimV, ScoreMod kScoreMod, bool kVarlen>
void launch_tile(const AttentionParams& params, const Plan& plan, void* stream) {
  const cuda::DeviceGuard device(params.device.index, "sm90");
  const TensorBoxes boxes = tensor_boxes(params, kHeadDim);
  const Launch launch = {cuda::encode_tensor_map(device, boxes.q, dtype),
                         cuda::encode_tensor_map(device, boxes.k, dtype),
                         cuda::encode_tensor_map(device, boxes.v, dtype),
                         cuda::encode_tensor_map(device, boxes.out, dtype),
                         static_cast<unsigned>(num_work_tiles(params, kHeadDim)),
                         score_params(params, kHeadDim),
                         cuda::encode_tensor_map(device, boxes.bias, dtype),
                         cuda::encode_tensor_map(device, boxes.mask, dtype)};
  constexpr int kMostSmem = kScoreMod == ScoreMod::kBiasMask ? kMaxSmem : 0;
  cuda::launch_kernel<kernel<cuda::Element<dtype>, kHeadDim, kHeadDimV, kScoreMod, kVarlen>,
                      kMostSmem>(device, plan.grid, plan.num_warps * 32, plan.smem_bytes, stream,
                                 params, make_launch_shape(params, plan), launch);
}

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, void* stream) {
  with_head_dim_v_tile<kTile>(params.head_dim_v, [&](auto tile_v) {
    with_kernel(params, [&](auto score_mod, auto varlen) {
      launch_tile<dtype, kTile, tile_v, score_mod, varlen>(params, plan, stream);
    });
  });
}

}  // namespace dlattn::sm90
