#pragma once

#include "cuda/forward/decode/traits.h"
#include "cuda/tile/key_parts/combine.cuh"

namespace dlattn::decode {

template <typename T, int kHeadDim, int kVariant, int kKeyBytes>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocks)
    combine_kernel(const __grid_constant__ AttentionParams params,
                   const __grid_constant__ DecodeShape shape) {
  constexpr Shape kShape = shape_of(kHeadDim, kVariant, kKeyBytes);
  combine_row<T, kHeadDim, block_m(kShape), block_n(kShape), kKeyBytes>(params, shape);
}

}  // namespace dlattn::decode
