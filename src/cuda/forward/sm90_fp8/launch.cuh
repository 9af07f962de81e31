#pragma once

#include "cuda/forward/sm90_fp8/boxes.h"
#include "cuda/forward/sm90_fp8/kernel.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::sm90_fp8 {

template <int kHeadDim, bool kVarlen, bool kScaled>
void launch_tile(const AttentionParams& params, const Plan& plan, LaunchOf<kScaled> launch,
                 void* stream) {
  const cuda::DeviceGuard device(params.device.index, "sm90_fp8");
  const TensorBoxes boxes = tensor_boxes(params, kHeadDim);
  constexpr DType kDType = DType::kFloat8E4M3;
  launch.q = cuda::encode_tensor_map(device, boxes.q, kDType);
  launch.k = cuda::encode_tensor_map(device, boxes.k, kDType);
  launch.v = cuda::encode_tensor_map(device, boxes.v, kDType);
  launch.num_work_tiles = static_cast<unsigned>(num_work_tiles(params, kHeadDim));
  cuda::launch_kernel<kernel<kHeadDim, kVarlen, kScaled>>(device, plan.grid, plan.num_warps * 32,
                                                          plan.smem_bytes, stream, params,
                                                          make_launch_shape(params, plan), launch);
}

template <int kTile, bool kScaled>
void launch_lengths(const AttentionParams& params, const Plan& plan,
                    const LaunchOf<kScaled>& launch, void* stream) {
  if (params.cu_seqlens_q) return launch_tile<kTile, true, kScaled>(params, plan, launch, stream);
  launch_tile<kTile, false, kScaled>(params, plan, launch, stream);
}

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, void* stream) {
  static_assert(dtype == DType::kFloat8E4M3);
  if constexpr (kTile <= kMaxQuantizedHeadDim) {
    if (params.precision != Precision::kInputs) {
      LaunchOf<true> scaled{};
      scaled.scales = block_scales(params);
      return launch_lengths<kTile, true>(quantized_problem(params, scaled.scales), plan, scaled,
                                         stream);
    }
  }
  launch_lengths<kTile, false>(params, plan, {}, stream);
}

}  // namespace dlattn::sm90_fp8
