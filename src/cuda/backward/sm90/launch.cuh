#pragma once

#include <type_traits>

#include "cuda/backward/sm90/convert.cuh"
#include "cuda/backward/sm90/kernel.cuh"
#include "cuda/backward/sm90/pair_kernel.cuh"
#include "cuda/backward/sm90/shape.h"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::backward_sm90 {

template <typename T, int kTile>
constexpr auto kernel_of(int variant) {
  if constexpr (is_wide(kTile)) {
    if (variant == kPair) return pair_kernel<T, kTile>;
  } else {
    if (variant == kPlain) return plain_kernel<T, kTile>;
    if (variant == kLate) return late_kernel<T, kTile>;
  }
  if (variant == kSoftcap) return softcap_kernel<T, kTile>;
  if (variant == kScoreMod) return score_mod_kernel<T, kTile>;
  if constexpr (has_score_mod_softcap_kernel(kTile)) {
    if (variant == kScoreModSoftcap) return score_mod_softcap_kernel<T, kTile>;
  }
  return variant == kDeterministic ? deterministic_kernel<T, kTile>
                                   : deterministic_softcap_kernel<T, kTile>;
}

template <DType dtype, int kTile>
void launch(const BackwardParams& params, const Plan&, const dlattn::Launch& launch, void* stream) {
  using T = cuda::Element<dtype>;
  const cuda::DeviceGuard device(params.forward.device.index, "backward");
  const int num_threads = launch.num_warps * 32;
  if (launch.variant == kConvert) {
    cuda::launch_kernel<convert_kernel<T, kTile>>(
        device, launch.grid, num_threads, launch.smem_bytes, stream, query_problem(params, kTile));
    return;
  }
  const TensorBoxes boxes = tensor_boxes(params, kTile);
  const TensorMaps maps = {cuda::encode_tensor_map(device, boxes.q, dtype),
                           cuda::encode_tensor_map(device, boxes.k, dtype),
                           cuda::encode_tensor_map(device, boxes.v, dtype),
                           cuda::encode_tensor_map(device, boxes.dout, dtype)};
  const Problem problem = key_problem(params, kTile);
  const auto launch_as = [&](auto variant) {
    constexpr auto kKernel = kernel_of<T, kTile>(variant);
    // A mask takes memory of its own.
    constexpr int kMaxSmem = variant == kScoreMod || variant == kScoreModSoftcap
                                 ? smem_with_mask(kTile, variant == kScoreModSoftcap)
                                 : 0;
    cuda::launch_clusters<kKernel, kMaxSmem>(device, launch.grid, launch.cluster_size, num_threads,
                                             launch.smem_bytes, stream, problem, maps);
  };
  switch (launch.variant) {
    case kPlain:
    case kPair:
      return launch_as(std::integral_constant<int, is_wide(kTile) ? kPair : kPlain>());
    case kLate:
      return launch_as(std::integral_constant<int, is_wide(kTile) ? kPair : kLate>());
    case kSoftcap:
      return launch_as(std::integral_constant<int, kSoftcap>());
    case kDeterministic:
      return launch_as(std::integral_constant<int, kDeterministic>());
    case kScoreMod:
      return launch_as(std::integral_constant<int, kScoreMod>());
    case kScoreModSoftcap:
      return launch_as(std::integral_constant<int, kScoreModSoftcap>());
    default:
      return launch_as(std::integral_constant<int, kDeterministicSoftcap>());
  }
}

}  // namespace dlattn::backward_sm90
