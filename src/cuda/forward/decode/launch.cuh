#pragma once

#include <type_traits>

#include "core/operations/tasks.h"
#include "cuda/forward/decode/combine.cuh"
#include "cuda/forward/decode/kernel.cuh"
#include "cuda/forward/decode/wide_kernel.cuh"
#include "cuda/launch.cuh"

namespace dlattn::decode {

template <typename T, typename KV, int kTile, int kVariant>
void launch_variant(const AttentionParams& params, const Plan& plan, void* stream) {
  constexpr int kMaxSmem = tile_config(kTile, kVariant, sizeof(KV)).smem_bytes;
  const DecodeShape shape = make_decode_shape(params, plan);
  const cuda::DeviceGuard device(params.device.index, "decode");
  if constexpr (is_wide(kTile)) {
    cuda::launch_kernel<wide_kernel<T, KV, kVariant>, kMaxSmem>(
        device, plan.grid, plan.num_warps * 32, plan.smem_bytes, stream, params, shape);
  } else {
    const auto launch_as = [&](auto paged, auto general) {
      cuda::launch_clusters<kernel<T, KV, kTile, kVariant, paged, general>, kMaxSmem>(
          device, plan.grid, plan.cluster_size, plan.num_warps * 32, plan.smem_bytes, stream,
          params, shape);
    };
    if (is_general(params)) {
      launch_as(std::true_type(), std::true_type());
    } else if (params.page_table.data) {
      launch_as(std::true_type(), std::false_type());
    } else {
      launch_as(std::false_type(), std::false_type());
    }
  }
}

// Calls `f` with the variant of a launch.
template <int kTile, typename F>
void with_variant(const Launch& launch, const F& f) {
  if constexpr (has_variant(kTile, kRows32)) {
    if (launch.variant == kRows32) return f(std::integral_constant<int, kRows32>());
  }
  f(std::integral_constant<int, kRows16>());
}

template <typename T, typename KV, int kTile>
void launch_of(const AttentionParams& params, const Plan& plan, void* stream) {
  with_variant<kTile>(
      plan, [&](auto variant) { launch_variant<T, KV, kTile, variant>(params, plan, stream); });
}

// `dtype`: of q, or with 8-bit keys theirs.
template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch&, void* stream) {
  if constexpr (dtype == DType::kInt8) {
    launch_of<half, std::int8_t, kTile>(params, plan, stream);
  } else if constexpr (dtype == DType::kFloat8E4M3) {
    launch_of<half, __nv_fp8_e4m3, kTile>(params, plan, stream);
  } else {
    launch_of<cuda::Element<dtype>, cuda::Element<dtype>, kTile>(params, plan, stream);
  }
}

}  // namespace dlattn::decode

namespace dlattn::decode::combine {

template <DType dtype, int kTile>
void launch(const CombineTask& task, const Plan& plan, const Launch& launch, void* stream);

// The kernels after keys of bytes are the same for both dtypes: int8's files have them.
extern template void launch<DType::kInt8, 64>(const CombineTask&, const Plan&, const Launch&,
                                              void*);
extern template void launch<DType::kInt8, 128>(const CombineTask&, const Plan&, const Launch&,
                                               void*);
extern template void launch<DType::kInt8, 256>(const CombineTask&, const Plan&, const Launch&,
                                               void*);

template <DType dtype, int kTile>
void launch(const CombineTask& task, const Plan& plan, const Launch& launch, void* stream) {
  if constexpr (dtype == DType::kFloat8E4M3) {
    combine::launch<DType::kInt8, kTile>(task, plan, launch, stream);
  } else {
    constexpr int kKeyBytes = dtype == DType::kInt8 ? 1 : kElementBytes;
    const AttentionParams& params = task;
    const DecodeShape shape = make_decode_shape(params, plan);
    const cuda::DeviceGuard device(params.device.index, "decode");
    const auto launch_as = [&](auto element) {
      with_variant<kTile>(launch, [&](auto variant) {
        cuda::launch_kernel<combine_kernel<decltype(element), kTile, variant, kKeyBytes>>(
            device, launch.grid, launch.num_warps * 32, launch.smem_bytes, stream, params, shape);
      });
    };
    if constexpr (kKeyBytes > 1) {
      launch_as(cuda::Element<dtype>());
    } else if (shape.is_bfloat16) {
      launch_as(__nv_bfloat16());
    } else {
      launch_as(half());
    }
  }
}

}  // namespace dlattn::decode::combine
