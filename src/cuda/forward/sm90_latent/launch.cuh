#pragma once

#include "core/operations/tasks.h"
#include "cuda/forward/sm90_latent/boxes.h"
#include "cuda/forward/sm90_latent/kernel.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::sm90_latent {

// `dtype`: of q, or with 8-bit keys theirs, which have narrow shapes alone.
template <DType dtype, int>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch&, void* stream) {
  constexpr bool kBytes = dtype == DType::kFloat8E4M3;
  const cuda::DeviceGuard device(params.device.index, "sm90_latent");
  const KeyBoxes boxes = key_boxes(params);
  const KernelArgs args = {cuda::encode_tensor_map(device, boxes.box, dtype), boxes.page_rows};
  using KV = cuda::Element<dtype>;
  using T = std::conditional_t<kBytes, half, KV>;
  const DecodeShape shape = decode_shape(params, plan);
  const auto start = [&](auto launch) {
    launch(device, plan.grid, plan.cluster_size, plan.num_warps * 32, plan.smem_bytes, stream,
           params, shape, args);
  };
  if (plan.variant == kRows16) {
    start([](const auto&... x) { cuda::launch_clusters<narrow_kernel<T, 16, KV>>(x...); });
  } else if (plan.variant == kRows32) {
    start([](const auto&... x) { cuda::launch_clusters<narrow_kernel<T, 32, KV>>(x...); });
  } else if constexpr (!kBytes) {
    start([](const auto&... x) { cuda::launch_clusters<kernel<T>>(x...); });
  }
}

}  // namespace dlattn::sm90_latent

namespace dlattn::sm90_latent::combine {

template <DType dtype, int kTile>
void launch(const CombineTask& task, const Plan& plan, const Launch& launch, void* stream) {
  const AttentionParams& params = task;
  if constexpr (dtype == DType::kFloat8E4M3) {  // out is of q's type
    if (params.q.dtype == DType::kBFloat16) {
      combine::launch<DType::kBFloat16, kTile>(task, plan, launch, stream);
    } else {
      combine::launch<DType::kFloat16, kTile>(task, plan, launch, stream);
    }
  } else {
    const cuda::DeviceGuard device(params.device.index, "sm90_latent");
    cuda::launch_kernel<combine_kernel<cuda::Element<dtype>>>(
        device, launch.grid, launch.num_warps * 32, launch.smem_bytes, stream, params,
        decode_shape(params, plan), combine_grid(params, plan));
  }
}

}  // namespace dlattn::sm90_latent::combine
