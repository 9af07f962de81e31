#pragma once

#include <cmath>

#include "cuda/ptx/math.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/warp.cuh"

// The probabilities of a tile that are to be rounded to e4m3, relative to the row's true maximum.
namespace dlattn::tile {

// Probabilities are times 2^kByteShift: the largest of a row is 256, near the end of e4m3, so that
// of smaller ones down to 2^-14 of it are normal numbers.
constexpr int kByteShift = 8;

// P = 2^(scale (S - base)) of a tile's row h, in place, times 2^kShift. Returns this lane's part of
// their sum.
template <int kShift, int kGroups>
__device__ __forceinline__ float exponentials(float (&acc_s)[kGroups][4], int h, float base,
                                              float scale) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int e = 2 * h; e < 2 * h + 2; ++e) {
      acc_s[j][e] = ptx::exp2(fmaf(acc_s[j][e] - base, scale, static_cast<float>(kShift)));
      sum += acc_s[j][e];
    }
  }
  return sum;
}

// P = 2^(S - row max) of a tile, in place, times 2^kByteShift; raises the row max before. `softmax`
// is a row's, with this lane's part of the sum, which is that of P before it is rounded. Returns
// the factor of what was accumulated before.
template <int kGroups>
__device__ __forceinline__ float probabilities(OnlineSoftmax& softmax, float (&acc_s)[kGroups][4],
                                               int h, float scale) {
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kGroups; ++j)
    largest = fmaxf(largest, fmaxf(acc_s[j][2 * h], acc_s[j][2 * h + 1]));
  // seed: row-max
  const float factor = softmax.raise_max(reduce_max<4>(largest), scale);
  softmax.row_sum += exponentials<kByteShift>(acc_s, h, softmax.finite_max(), scale);
  return factor;
}

// A row's result; row_sum is the whole row's, of probabilities times 2^kByteShift, as what was
// accumulated is. `shift`: what all logits of the row have beside its scores.
__device__ __forceinline__ RowResult finalize_bytes(const OnlineSoftmax& softmax, float scale,
                                                    const float* sink, float shift = 0.0f) {
  constexpr float kUnit = 1.0f / (1 << kByteShift);
  RowResult result =
      finalize(RowMax(softmax.finite_max(), true), scale, softmax.row_sum * kUnit, sink, shift);
  result.scale *= kUnit;
  return result;
}

}  // namespace dlattn::tile
