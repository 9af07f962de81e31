#pragma once

#include <cmath>

#include "cuda/ptx/math.cuh"
#include "cuda/tile/row_max.cuh"

// The streaming softmax of one row. Scores are in units of their own; `scale` makes them base 2,
// after the row max has been subtracted: so no magnitude is rounded or overflows.
namespace dlattn::tile {

struct OnlineSoftmax {
  float row_max = -INFINITY;  // of the scores seen so far
  float row_sum = 0.0f;       // of probabilities relative to it; may be one lane's part of it

  // The row max, or 0 for a row that has seen nothing but -inf: -inf - -inf is NaN, whereas
  // -inf - 0 gives the probability 0 that is meant.
  __device__ __forceinline__ float finite_max() const {
    return row_max == -INFINITY ? 0.0f : row_max;
  }

  // Raises the row max to the maximum of a tile's scores. Returns the factor that the row's
  // accumulators must be multiplied with. A NaN score is no maximum, but its probability is NaN, so
  // that it reaches sum and output.
  __device__ __forceinline__ float raise_max(float tile_max, float scale) {
    const float old_max = row_max;
    row_max = fmaxf(old_max, tile_max);
    const float factor = ptx::exp2((old_max - finite_max()) * scale);
    row_sum *= factor;
    return factor;
  }

  __device__ __forceinline__ float probability(float score, float scale) const {
    return ptx::exp2((score - finite_max()) * scale);
  }

  // The row's result; row_sum is the whole row's.
  __device__ __forceinline__ RowResult finalize(float scale, const float* sink) const {
    return tile::finalize(RowMax(finite_max(), true), scale, row_sum, sink);
  }
};

}  // namespace dlattn::tile
