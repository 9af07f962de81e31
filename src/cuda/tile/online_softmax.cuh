#pragma once

#include <cmath>

#include "cuda/ptx/math.cuh"

// The streaming softmax of one row. Scores are in base 2: the natural ones times log2(e).
namespace dlattn::tile {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct OnlineSoftmax {
  float row_max = -INFINITY;  // of the scores seen so far
  float row_sum = 0.0f;       // of 2^(score - row_max); may be one lane's part of it

  // What scores are taken relative to. A row that has seen nothing but -inf has no maximum to
  // subtract: -inf - -inf is NaN, whereas -inf - 0 gives the probability 0 that is meant.
  __device__ __forceinline__ float reference() const {
    return row_max == -INFINITY ? 0.0f : row_max;
  }

  // Takes in the maximum of a tile's scores. Returns the factor that what has been accumulated so
  // far (by this row) must be multiplied with. A NaN score is no maximum, but its probability is
  // NaN, so that it reaches sum and output.
  __device__ __forceinline__ float raise_max(float tile_max) {
    const float old_max = row_max;
    row_max = fmaxf(old_max, tile_max);
    const float factor = ptx::exp2(old_max - reference());
    row_sum *= factor;
    return factor;
  }

  __device__ __forceinline__ float probability(float score) const {
    return ptx::exp2(score - reference());
  }
};

struct RowResult {
  float scale;  // out = scale * accumulator; 0 if the row attends to nothing: then out is 0
                // whatever was accumulated
  float lse;    // natural log
};

// An accumulator times its row's scale.
__device__ __forceinline__ float scaled(float accumulator, float scale) {
  return scale == 0.0f ? 0.0f : accumulator * scale;
}

// `softmax` holds the whole row's sum; `sink` is the head's logit in the denominator, or null.
__device__ __forceinline__ RowResult finalize(OnlineSoftmax softmax, const float* sink) {
  float factor = 1.0f;
  if (sink) {
    const float score = *sink * kLog2e;
    factor = softmax.raise_max(score);
    softmax.row_sum += softmax.probability(score);
  }
  const float scale = softmax.row_sum == 0.0f ? 0.0f : __fdividef(factor, softmax.row_sum);
  return {scale, softmax.reference() * kLn2 + logf(softmax.row_sum)};
}

}  // namespace dlattn::tile
