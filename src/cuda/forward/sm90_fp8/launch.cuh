#pragma once

#include "cuda/forward/sm90_fp8/boxes.h"
#include "cuda/forward/sm90_fp8/kernel.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::sm90_fp8 {

template <int kHeadDim, bool kVarlen, bool kScaled, bool kGiven>
void launch_tile(const AttentionParams& params, const Plan& plan, KernelArgsOf<kScaled> args,
                 void* stream) {
  const cuda::DeviceGuard device(params.device.index, "sm90_fp8");
  const TensorBoxes boxes = tensor_boxes(params, kHeadDim);
  constexpr DType kDType = DType::kFloat8E4M3;
  args.q = cuda::encode_tensor_map(device, boxes.q, kDType);
  args.k = cuda::encode_tensor_map(device, boxes.k, kDType);
  args.v = cuda::encode_tensor_map(device, boxes.v, kDType);
  args.num_work_tiles = static_cast<unsigned>(num_work_tiles(params, kHeadDim));
  cuda::launch_kernel<kernel<kHeadDim, kVarlen, kScaled, kGiven>>(
      device, plan.grid, plan.num_warps * 32, plan.smem_bytes, stream, params,
      make_launch_shape(params, plan), args);
}

template <int kTile, bool kScaled>
void launch_lengths(const AttentionParams& params, const Plan& plan,
                    const KernelArgsOf<kScaled>& args, void* stream) {
  if (has_given_scores(params)) {
    KernelArgsOf<true> given{};
    if constexpr (kScaled) given = args;
    return launch_tile<kTile, false, true, true>(params, plan, given, stream);
  }
  if (params.cu_seqlens_q)
    return launch_tile<kTile, true, kScaled, false>(params, plan, args, stream);
  launch_tile<kTile, false, kScaled, false>(params, plan, args, stream);
}

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch&, void* stream) {
  static_assert(dtype == DType::kFloat8E4M3);
  if constexpr (is_quantized_width(kTile)) {
    if (params.precision != Precision::kInputs) {
      KernelArgsOf<true> scaled{};
      scaled.scales = block_scales(params);
      return launch_lengths<kTile, true>(quantized_problem(params, scaled.scales), plan, scaled,
                                         stream);
    }
  }
  launch_lengths<kTile, false>(params, plan, {}, stream);
}

}  // namespace dlattn::sm90_fp8
