#pragma once

#include <cmath>

namespace dlattn::tile {

constexpr unsigned kFullMask = 0xffffffffu;

// Maximum and sum over aligned groups of kLanes lanes; every lane of a group gets the result.
template <int kLanes>
__device__ __forceinline__ float reduce_max(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, offset));
  return x;
}

template <int kLanes>
__device__ __forceinline__ float reduce_sum(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullMask, x, offset);
  return x;
}

}  // namespace dlattn::tile
