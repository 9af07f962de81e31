#pragma once

#include <cstdint>

#include "cuda/tile/vec.cuh"

// The steps of a lane over all accumulators of a product, for any softmax between the products.
namespace dlattn::tile::wgmma {

// Multiplies each row of accumulators with its factor.
template <int kCount>
__device__ __forceinline__ void rescale(float (&acc)[kCount], const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] *= factors[i / 2 % 2];
}

// Probabilities as the operand of the product with V: the accumulators of two neighbouring groups
// of 8 keys are, packed, what the lane holds of the 16 x 16 operand.
template <typename T, int kScores>
__device__ __forceinline__ void pack_probabilities(std::uint32_t (&rP)[kScores / 8][4],
                                                   const float (&acc_s)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      rP[i][e] = tile::pack<T>(acc_s[8 * i + 2 * e], acc_s[8 * i + 2 * e + 1]);
  }
}

}  // namespace dlattn::tile::wgmma
