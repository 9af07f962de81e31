#pragma once

#include <cmath>
#include <cstdint>

#include "core/problem/quantized.h"
#include "cuda/forward/wmma8/given_rows.cuh"
#include "cuda/forward/wmma8/int8_query.cuh"
#include "cuda/forward/wmma8/softmax.cuh"
#include "cuda/tile/e4m3_softmax.cuh"

// Scores of 8-bit integers, whose scale is a tile's of a row, and the probabilities that become of
// them: relative to the maximum of the tile, so that each tile has the whole range of e4m3.
namespace dlattn::wmma8 {

// Probabilities are times 2^kInt8Shift: the largest of a tile is 64, so that sums of their products
// with values fit fp16 (largest_value()).
constexpr int kInt8Shift = 6;

// The streaming softmax of a row over tiles whose scores are in units of their own. The row max is
// of scores to base 2; kNatural: of natural ones, whatever their magnitude, as a bias may have any.
template <bool kNatural>
struct TileSoftmax {
  float row_max = -INFINITY;
  float row_sum = 0.0f;  // of probabilities relative to it; this lane's part

  // The row max, or 0 for a row that has seen nothing, as tile::OnlineSoftmax has it.
  __device__ __forceinline__ float finite_max() const {
    return row_max == -INFINITY ? 0.0f : row_max;
  }
  // The weight of probabilities that are relative to `other_max`.
  __device__ __forceinline__ float weight(float other_max) const {
    return ptx::exp2((other_max - finite_max()) * (kNatural ? tile::kLog2e : 1.0f));
  }
  // The same of probabilities that are times 2^kInt8Shift.
  __device__ __forceinline__ float shifted_weight(float other_max) const {
    if constexpr (kNatural) return weight(other_max) * (1.0f / (1 << kInt8Shift));
    return weight(other_max - kInt8Shift);
  }
};

// A tile of a row: its scores are biased integers or, with kNatural, natural; -inf where a key is
// hidden.
template <bool kNatural>
struct TileOfRow {
  float largest;  // of its scores
  float scale;    // makes them base 2

  template <int kGroups>
  __device__ __forceinline__ TileOfRow(const float (&acc_s)[kGroups][4], int h, float scale)
      : scale(scale) {
    largest = fmaxf(acc_s[0][2 * h], acc_s[0][2 * h + 1]);
#pragma unroll
    for (int j = 1; j < kGroups; ++j)
      largest = fmaxf(largest, fmaxf(acc_s[j][2 * h], acc_s[j][2 * h + 1]));
    // seed: tile-max
    largest = tile::reduce_max<4>(largest);
    // A row that sees none of the tile has nothing of a scale that is NaN. Nor is a scale ever 0:
    // -inf times it would be NaN.
    constexpr float kLeast = 0x1p-126f;
    if constexpr (kNatural) return;
    if (largest == -INFINITY || scale < kLeast) this->scale = kLeast;
  }

  // The row max of the tile alone, in the units of TileSoftmax.
  __device__ __forceinline__ float max() const {
    return kNatural ? largest : (largest - kIntegerBias) * scale;
  }

  // P = 2^(S - the tile's max) in place, times 2^kInt8Shift. Returns this lane's part of their sum.
  template <int kGroups>
  __device__ __forceinline__ float probabilities(float (&acc_s)[kGroups][4], int h) const {
    const float base = largest == -INFINITY ? 0.0f : largest;
    return tile::exponentials<kInt8Shift>(acc_s, h, base, scale);
  }
};

// Makes scores of a sequence's products, with everything but what is a row's own. kTilesOfScale:
// tiles of keys that share a scale.
template <bool kGeneral, int kTilesOfScale>
struct Int8Scores {
  GivenRowsOf<kGeneral> given;
  const QuantizedView& view;
  float scale;  // softmax_scale; but in general kernels to base 2
  // Where the scales of the walk's first tile stand, those of the next ones being before; where
  // tiles share scales, those of the sequence's first. 32 bits are enough: keys and values of more
  // scales would take terabytes.
  unsigned scale_start;

  // The scales of the tile at hand.
  template <typename Consumer>
  __device__ __forceinline__ float k_scale(const Consumer& consumer) const {
    return view.k_scale[scale_index(consumer)];
  }
  template <typename Consumer>
  __device__ __forceinline__ float v_scale(const Consumer& consumer) const {
    return view.v_scale[scale_index(consumer)];
  }

  // Products of a tile to natural scores; `scales` makes them that, of each of the lane's rows.
  // `tile`: counted from the sequence's first. In general kernels alone.
  template <int kGroups>
  __device__ __forceinline__ void apply_given(float (&acc_s)[1][kGroups][4],
                                              const float (&scales)[2], const tile::Mask& mask,
                                              int tile, int lane) const {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_s[0][j][e] = (acc_s[0][j][e] - kIntegerBias) * scales[e / 2];
    }
    const int first_key = tile * (8 * kGroups);
    if (given.has_bias()) given.scores().add_bias(acc_s, mask, first_key, lane);
    if (given.has_mask()) return given.scores().hide(acc_s, mask, first_key, lane);
    apply_mask(acc_s, mask, lane);
  }

 private:
  template <typename Consumer>
  __device__ __forceinline__ unsigned scale_index(const Consumer& consumer) const {
    if constexpr (kTilesOfScale == 1) return scale_start - consumer.i;
    // seed: shared-scale
    return scale_start + static_cast<unsigned>(consumer.tile()) / kTilesOfScale;
  }
};

}  // namespace dlattn::wmma8
