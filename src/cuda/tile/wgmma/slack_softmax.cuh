#pragma once

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/warp.cuh"
#include "cuda/tile/wgmma/accumulators.cuh"

// The streaming softmax of rows that two warpgroups share, each of which has probabilities of some
// tiles of keys and some columns of out: a row max goes from tile to tile, and so from one
// warpgroup to the other. It is raised only where a tile's scores exceed it by more than 2^kSlack,
// so that out is seldom scaled; probabilities are up to 2^kSlack. For this lane's two rows of its
// warp's 16: score or accumulator i is of row i / 2 % 2.
namespace dlattn::tile::wgmma {

constexpr float kSlack = 8.0f;

// The max of row h with a tile's scores. All lanes call it.
template <int kScores>
__device__ __forceinline__ float raised_max(const float (&acc_s)[kScores],
                                            const OnlineSoftmax& softmax, int h, float scale) {
  float tile_max = -INFINITY;
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j)
    tile_max = fmaxf(tile_max, fmaxf(acc_s[4 * j + 2 * h], acc_s[4 * j + 2 * h + 1]));
  tile_max = reduce_max<4>(tile_max);
  const float old = softmax.row_max;
  return (tile_max - old) * scale > kSlack ? tile_max : old;
}

// Turns scores into probabilities relative to these row maxima, by one FFMA each where their
// rounding does not matter (tile/DESIGN.md).
template <int kScores>
__device__ __forceinline__ void make_probabilities(float (&acc_s)[kScores],
                                                   const float (&maxima)[2], float scale) {
  const float bases[2] = {maxima[0] == -INFINITY ? 0.0f : maxima[0],
                          maxima[1] == -INFINITY ? 0.0f : maxima[1]};
  const float negs[2] = {-bases[0] * scale, -bases[1] * scale};
  if (fmaxf(fabsf(negs[0]), fabsf(negs[1])) < kMostScaled) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) acc_s[i] = ptx::exp2(fmaf(acc_s[i], scale, negs[i / 2 % 2]));
  } else {
#pragma unroll
    for (int i = 0; i < kScores; ++i) acc_s[i] = ptx::exp2((acc_s[i] - bases[i / 2 % 2]) * scale);
  }
}

// This lane's part of the sum of row h.
template <int kScores>
__device__ __forceinline__ float sum_of_row(const float (&probabilities)[kScores], int h) {
  float sums[2] = {};
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    sums[0] += probabilities[4 * j + 2 * h];
    sums[1] += probabilities[4 * j + 2 * h + 1];
  }
  return sums[0] + sums[1];
}

// Raises row maxima, and scales what the rows have accumulated, if any of the warp's has changed.
template <int kCount>
__device__ __forceinline__ void raise(OnlineSoftmax (&softmax)[2], const float (&maxima)[2],
                                      float scale, float (&acc_o)[kCount]) {
  const bool rises = maxima[0] != softmax[0].row_max || maxima[1] != softmax[1].row_max;
  if (!__any_sync(kFullMask, rises)) return;
  const float factors[2] = {softmax[0].raise_max(maxima[0], scale),
                            softmax[1].raise_max(maxima[1], scale)};
  rescale(acc_o, factors);
}

}  // namespace dlattn::tile::wgmma
