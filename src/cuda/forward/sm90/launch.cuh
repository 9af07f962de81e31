#pragma once

#include "cuda/forward/sm90/boxes.h"
#include "cuda/forward/sm90/cached_kernel.cuh"
#include "cuda/forward/sm90/head_order.h"
#include "cuda/forward/sm90/kernel.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::sm90 {

// The kernel for keys that lie as kKeys says.
enum class Keys { kFixed, kVarlen, kCached };
template <typename T, int kHeadDim, int kHeadDimV, Variant kVariant, Keys kKeys>
constexpr auto kernel_of() {
  if constexpr (kKeys == Keys::kCached) {
    return cached_kernel<T, kHeadDim, kHeadDimV, kVariant>;
  } else {
    return kernel<T, kHeadDim, kHeadDimV, kVariant, kKeys == Keys::kVarlen>;
  }
}

// No template: each kernel's launcher would compile it anew, in most of its host code's time.
inline KernelArgs kernel_args(const cuda::DeviceGuard& device, const AttentionParams& params,
                              const Plan& plan, DType dtype, int head_dim, Variant variant) {
  const TensorBoxes boxes = tensor_boxes(params, head_dim, variant);
  const std::int64_t tiles = num_work_tiles(params, head_dim, variant);
  return {cuda::encode_tensor_map(device, boxes.q, dtype),
          cuda::encode_tensor_map(device, boxes.k, dtype),
          cuda::encode_tensor_map(device, boxes.v, dtype),
          cuda::encode_tensor_map(device, boxes.out, dtype),
          static_cast<unsigned>(tiles),
          score_params(params, head_dim),
          cuda::encode_tensor_map(device, boxes.bias, dtype),
          cuda::encode_tensor_map(device, boxes.mask, dtype),
          boxes.k_page_rows,
          boxes.v_page_rows,
          head_groups(params, plan.block_m, plan.grid < tiles)};
}

template <DType dtype, int kHeadDim, int kHeadDimV, Variant kVariant, Keys kKeys>
void launch_tile(const AttentionParams& params, const Plan& plan, void* stream) {
  const cuda::DeviceGuard device(params.device.index, "sm90");
  const KernelArgs args = kernel_args(device, params, plan, dtype, kHeadDim, kVariant);
  constexpr int kMostSmem = kVariant == Variant::kLoaded ? kMaxSmem : 0;
  constexpr auto kKernel = kernel_of<cuda::Element<dtype>, kHeadDim, kHeadDimV, kVariant, kKeys>();
  cuda::launch_clusters<kKernel, kMostSmem>(device, plan.grid, plan.cluster_size,
                                            plan.num_warps * 32, plan.smem_bytes, stream, params,
                                            make_launch_shape(params, plan), args);
}

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch&, void* stream) {
  const Variant planned = static_cast<Variant>(plan.variant);
  with_head_dim_v_tile<kTile>(params.head_dim_v, [&](auto tile_v) {
    if (is_cache(params)) {
      return with_cached_kernel<kTile>(planned, [&](auto variant) {
        launch_tile<dtype, kTile, tile_v, variant, Keys::kCached>(params, plan, stream);
      });
    }
    with_kernel<kTile>(planned, params.cu_seqlens_q != nullptr, [&](auto variant, auto varlen) {
      constexpr Keys kKeys = varlen ? Keys::kVarlen : Keys::kFixed;
      launch_tile<dtype, kTile, tile_v, variant, kKeys>(params, plan, stream);
    });
  });
}

}  // namespace dlattn::sm90
