#pragma once

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::tile::mma {

// Turns the scores of row h of a lane's two into probabilities relative to the true row max, in
// place, and adds them to the lane's part of the row's sum. Returns the factor that the row's
// accumulators must be multiplied with. All lanes call it.
template <int kGroups>
__device__ __forceinline__ float make_probabilities(OnlineSoftmax& softmax, float (&x)[kGroups][4],
                                                    int h, float scale_log2) {
  float tile_max = -INFINITY;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) tile_max = fmaxf(tile_max, fmaxf(x[j][2 * h], x[j][2 * h + 1]));
  const float factor = softmax.raise_max(reduce_max<4>(tile_max), scale_log2);
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int e = 2 * h; e < 2 * h + 2; ++e) {
      x[j][e] = softmax.probability(x[j][e], scale_log2);
      softmax.row_sum += x[j][e];
    }
  }
  return factor;
}

}  // namespace dlattn::tile::mma
