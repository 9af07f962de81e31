#pragma once

#include <cmath>

#include "cuda/ptx/math.cuh"
#include "cuda/tile/reference.cuh"

// The streaming softmax of one row. Scores are in units of their own; `scale` makes them base 2,
// after the row max has been subtracted: so no magnitude is rounded or overflows.
namespace dlattn::tile {

struct OnlineSoftmax {
  float row_max = -INFINITY;  // of the scores seen so far
  float row_sum = 0.0f;       // of probabilities relative to it; may be one lane's part of it

  // What scores are taken relative to. A row that has seen nothing but -inf has no maximum to
  // subtract: -inf - -inf is NaN, whereas -inf - 0 gives the probability 0 that is meant.
  __device__ __forceinline__ float reference() const {
    return row_max == -INFINITY ? 0.0f : row_max;
  }

  // Takes in the maximum of a tile's scores. Returns the factor that what has been accumulated so
  // far (by this row) must be multiplied with. A NaN score is no maximum, but its probability is
  // NaN, so that it reaches sum and output.
  __device__ __forceinline__ float raise_max(float tile_max, float scale) {
    const float old_max = row_max;
    row_max = fmaxf(old_max, tile_max);
    const float factor = ptx::exp2((old_max - reference()) * scale);
    row_sum *= factor;
    return factor;
  }

  __device__ __forceinline__ float probability(float score, float scale) const {
    return ptx::exp2((score - reference()) * scale);
  }

  // The row's result; row_sum is the whole row's.
  __device__ __forceinline__ RowResult finalize(float scale, const float* sink) const {
    return tile::finalize(Reference(reference(), true), scale, row_sum, sink);
  }
};

}  // namespace dlattn::tile
