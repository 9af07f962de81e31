#pragma once

#include "cuda/forward/decode/combine.cuh"
#include "cuda/forward/decode/kernel.cuh"
#include "cuda/launch.cuh"

namespace dlattn::decode {

template <typename T, typename KV, int kTile, int kVariant>
void launch_variant(const AttentionParams& params, const Plan& plan, void* stream) {
  constexpr int kKeyBytes = sizeof(KV);
  constexpr int kMaxSmem = tile_config(kTile, kVariant, kKeyBytes).smem_bytes;
  const DecodeShape shape = make_decode_shape(params, plan);
  const cuda::DeviceGuard device(params.device.index, "decode");
  const auto launch_as = [&](auto paged, auto general) {
    cuda::launch_clusters<kernel<T, KV, kTile, kVariant, paged, general>, kMaxSmem>(
        device, plan.grid, plan.cluster_size, plan.num_warps * 32, plan.smem_bytes, stream, params,
        shape);
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
  const auto combine_as = [&](auto element) {
    cuda::launch_kernel<combine_kernel<decltype(element), kTile, kVariant, kKeyBytes>>(
        device, params.batch_size * params.num_heads * params.seqlen_q * combine_blocks(kTile),
        kCombineThreads, combine_smem_bytes(), stream, params, shape);
  };
  if (kKeyBytes == 1 && shape.is_bfloat16) return combine_as(__nv_bfloat16());
  combine_as(T());
}

template <typename T, typename KV, int kTile>
void launch_of(const AttentionParams& params, const Plan& plan, void* stream) {
  if constexpr (has_variant(kTile, kRows32)) {
    if (plan.variant == kRows32) return launch_variant<T, KV, kTile, kRows32>(params, plan, stream);
  }
  launch_variant<T, KV, kTile, kRows16>(params, plan, stream);
}

// `dtype`: of q, or with 8-bit keys theirs.
template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, void* stream) {
  if constexpr (dtype == DType::kInt8) {
    launch_of<half, std::int8_t, kTile>(params, plan, stream);
  } else if constexpr (dtype == DType::kFloat8E4M3) {
    launch_of<half, __nv_fp8_e4m3, kTile>(params, plan, stream);
  } else {
    launch_of<cuda::Element<dtype>, cuda::Element<dtype>, kTile>(params, plan, stream);
  }
}

}  // namespace dlattn::decode
