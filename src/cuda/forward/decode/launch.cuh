#pragma once

#include "cuda/forward/decode/combine.cuh"
#include "cuda/forward/decode/kernel.cuh"
#include "cuda/launch.cuh"

namespace dlattn::decode {

template <DType dtype, int kTile, int kVariant>
void launch_variant(const AttentionParams& params, const Plan& plan, void* stream) {
  using T = cuda::Element<dtype>;
  constexpr int kMaxSmem = tile_config(kTile, kVariant).smem_bytes;
  const DecodeShape shape = make_decode_shape(params, plan);
  const cuda::DeviceGuard device(params.device.index, "decode");
  const auto launch_as = [&](auto paged, auto general) {
    cuda::launch_kernel<kernel<T, kTile, kVariant, paged, general>, kMaxSmem>(
        device, plan.grid, plan.num_warps * 32, plan.smem_bytes, stream, params, shape);
  };
  const auto launch_with = [&](auto paged) {
    if (is_general(params)) {
      launch_as(paged, std::true_type());
    } else {
      launch_as(paged, std::false_type());
    }
  };
  if (params.page_table.data) {
    launch_with(std::true_type());
  } else {
    launch_with(std::false_type());
  }
  if (shape.whole) return;
  cuda::launch_kernel<combine_kernel<T, kTile, kVariant>>(
      device, params.batch_size * params.num_heads * params.seqlen_q, kCombineThreads,
      combine_smem_bytes(), stream, params, shape);
}

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, void* stream) {
  if constexpr (has_variant(kTile, kRows32)) {
    if (plan.variant == kRows32) return launch_variant<dtype, kTile, kRows32>(params, plan, stream);
  }
  launch_variant<dtype, kTile, kRows16>(params, plan, stream);
}

}  // namespace dlattn::decode
