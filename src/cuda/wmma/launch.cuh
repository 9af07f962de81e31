#pragma once

#include "cuda/launch.cuh"
#include "cuda/wmma/general.cuh"
#include "cuda/wmma/kernel.cuh"
#include "cuda/wmma/split.cuh"

namespace dlattn::wmma {

// The kernel of a variant.
template <typename T, int kTile, int kVariant>
constexpr auto variant_kernel() {
  if constexpr (kVariant == kSplit) {
    return split_kernel<T, kTile>;
  } else if constexpr (kVariant == kGeneral) {
    return general_kernel<T, kTile>;
  } else {
    return kernel<T, kTile, kVariant>;
  }
}

template <DType dtype, int kTile, int kVariant>
void launch_variant(const AttentionParams& params, const Plan& plan, void* stream) {
  constexpr auto kKernel = variant_kernel<cuda::Element<dtype>, kTile, kVariant>();
  constexpr int kMaxSmem = tile_config(kTile, kVariant).smem_bytes;
  const LaunchShape shape = make_launch_shape(params, plan);
  const auto launch = [&](const auto&... args) {
    cuda::launch_kernel<kKernel, kMaxSmem>("wmma", params.device.index, plan.grid,
                                           plan.num_warps * 32, plan.smem_bytes, stream, args...);
  };
  if constexpr (kVariant == kSplit) {
    launch(make_split_params(params, shape));
  } else {
    launch(params, shape);
  }
}

template <DType dtype, int kTile, int kVariant = 0>
void launch_planned(const AttentionParams& params, const Plan& plan, void* stream) {
  if constexpr (kVariant < kNumVariants) {
    if constexpr (has_variant(kTile, kVariant)) {
      if (plan.variant == kVariant)
        return launch_variant<dtype, kTile, kVariant>(params, plan, stream);
    }
    launch_planned<dtype, kTile, kVariant + 1>(params, plan, stream);
  }
}

template <DType dtype, int kTile>
void launch(const AttentionParams& params, const Plan& plan, void* stream) {
  launch_planned<dtype, kTile>(params, plan, stream);
}

}  // namespace dlattn::wmma
