#pragma once

#include "cuda/forward/sm90_fp8/boxes.h"
#include "cuda/forward/sm90_fp8/kernel.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::sm90_fp8 {

template <int kHeadDim, bool kVarlen>
void launch_tile(const AttentionParams& params, const Plan& plan, void* stream) {
  const cuda::DeviceGuard device(params.device.index, "sm90_fp8");
  const TensorBoxes boxes = tensor_boxes(params, kHeadDim);
  constexpr DType kDType = DType::kFloat8E4M3;
  const Launch launch = {cuda::encode_tensor_map(device, boxes.q, kDType),
                         cuda::encode_tensor_map(device, boxes.k, kDType),
                         cuda::encode_tensor_map(device, boxes.v, kDType),
                         static_cast<unsigned>(num_work_tiles(params, kHeadDim))};
  cuda::launch_kernel<kernel<kHeadDim, kVarlen>>(device, plan.grid, plan.num_warps * 32,
                                                 plan.smem_bytes, stream, params,
                                                 make_launch_shape(params, plan), launch);
}

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, void* stream) {
  static_assert(dtype == DType::kFloat8E4M3);
  if (params.cu_seqlens_q) return launch_tile<kTile, true>(params, plan, stream);
  launch_tile<kTile, false>(params, plan, stream);
}

}  // namespace dlattn::sm90_fp8
