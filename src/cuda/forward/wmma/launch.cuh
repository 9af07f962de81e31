#pragma once

#include "cuda/forward/wmma/boxes.cuh"
#include "cuda/forward/wmma/boxes.h"
#include "cuda/forward/wmma/cached.cuh"
#include "cuda/forward/wmma/general.cuh"
#include "cuda/forward/wmma/kernel.cuh"
#include "cuda/forward/wmma/packing.h"
#include "cuda/forward/wmma/persistent.cuh"
#include "cuda/forward/wmma/split.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::wmma {

// The kernel of a variant.
template <typename T, int kTile, int kVariant, bool kPacked, bool kCached>
constexpr auto variant_kernel() {
  if constexpr (kCached) {
    return cached_kernel<T, kTile, kVariant>;
  } else if constexpr (splits_keys(kVariant)) {
    return split_kernel<T, kTile, kVariant>;
  } else if constexpr (kVariant == kGeneral) {
    return general_kernel<T, kTile>;
  } else if constexpr (kVariant == kPersistent) {
    return persistent_kernel<T, kTile>;
  } else {
    return kernel<T, kTile, kVariant, kPacked>;
  }
}

template <DType dtype, int kTile, int kVariant, bool kPacked = false, bool kCached = false>
void launch_variant(const AttentionParams& params, const LaunchShape& shape, const Plan& plan,
                    void* stream) {
  constexpr auto kKernel =
      variant_kernel<cuda::Element<dtype>, kTile, kVariant, kPacked, kCached>();
  constexpr int kMaxSmem = tile_config(kTile, kVariant).smem_bytes;
  const cuda::DeviceGuard device(params.device.index, "wmma");
  const auto launch = [&](const auto&... args) {
    cuda::launch_kernel<kKernel, kMaxSmem>(device, plan.grid, plan.num_warps * 32, plan.smem_bytes,
                                           stream, args...);
  };
  if constexpr (splits_keys(kVariant)) {
    launch(make_split_params(params, shape));
  } else if constexpr (uses_tma(kTile, kVariant)) {
    const TensorBoxes boxes = tensor_boxes(params, kTile, kVariant);
    const bool full = full_segments(params, kTile);
    const auto encode = [&](const cuda::TensorBox& box) {
      return cuda::encode_tensor_map(device, full ? all_segments(box, kTile) : box, dtype);
    };
    launch(params, shape, TensorMaps{encode(boxes.q), encode(boxes.k), encode(boxes.v), full});
  } else {
    launch(params, shape);
  }
}

template <DType dtype, int kTile, int kVariant = 0>
void launch_planned(const AttentionParams& params, const LaunchShape& shape, const Plan& plan,
                    void* stream) {
  if constexpr (kVariant < kNumVariants) {
    if constexpr (has_variant(kTile, kVariant)) {
      if constexpr (reads_caches(kTile, kVariant)) {
        if (plan.variant == kVariant && is_cache(params))
          return launch_variant<dtype, kTile, kVariant, false, true>(params, shape, plan, stream);
      }
      if constexpr (packs_heads(kVariant)) {
        if (plan.variant == kVariant && plan.packed_heads > 1)
          return launch_variant<dtype, kTile, kVariant, true>(params, shape, plan, stream);
      }
      if (plan.variant == kVariant)
        return launch_variant<dtype, kTile, kVariant>(params, shape, plan, stream);
    }
    launch_planned<dtype, kTile, kVariant + 1>(params, shape, plan, stream);
  }
}

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, const dlattn::Launch&, void* stream) {
  with_folded_heads(params, plan, [&](const AttentionParams& launched, const LaunchShape& shape) {
    launch_planned<dtype, kTile>(launched, shape, plan, stream);
  });
}

}  // namespace dlattn::wmma
