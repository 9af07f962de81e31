#pragma once

#include "cuda/forward/sm90/boxes.h"
#include "cuda/forward/sm90/kernel.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::sm90 {

template <DType dtype, int kHeadDim, int kHeadDimV, Variant kVariant, bool kVarlen>
void launch_tile(const AttentionParams& params, const Plan& plan, void* stream) {
  const cuda::DeviceGuard device(params.device.index, "sm90");
  const TensorBoxes boxes = tensor_boxes(params, kHeadDim, kVariant);
  const KernelArgs args = {cuda::encode_tensor_map(device, boxes.q, dtype),
                           cuda::encode_tensor_map(device, boxes.k, dtype),
                           cuda::encode_tensor_map(device, boxes.v, dtype),
                           cuda::encode_tensor_map(device, boxes.out, dtype),
                           static_cast<unsigned>(num_work_tiles(params, kHeadDim, kVariant)),
                           score_params(params, kHeadDim),
                           cuda::encode_tensor_map(device, boxes.bias, dtype),
                           cuda::encode_tensor_map(device, boxes.mask, dtype)};
  constexpr int kMostSmem = kVariant == Variant::kLoaded ? kMaxSmem : 0;
  cuda::launch_kernel<kernel<cuda::Element<dtype>, kHeadDim, kHeadDimV, kVariant, kVarlen>,
                      kMostSmem>(device, plan.grid, plan.num_warps * 32, plan.smem_bytes, stream,
                                 params, make_launch_shape(params, plan), args);
}

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch&, void* stream) {
  with_head_dim_v_tile<kTile>(params.head_dim_v, [&](auto tile_v) {
    with_kernel<kTile>(static_cast<Variant>(plan.variant), params.cu_seqlens_q != nullptr,
                       [&](auto variant, auto varlen) {
                         launch_tile<dtype, kTile, tile_v, variant, varlen>(params, plan, stream);
                       });
  });
}

}  // namespace dlattn::sm90
