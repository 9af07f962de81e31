#pragma once

#include <cmath>
#include <cstdint>

#include "core/problem/quantized.h"
#include "cuda/forward/wmma8/int8_query.cuh"
#include "cuda/forward/wmma8/softmax.cuh"

// Scores of 8-bit integers, whose scale is a tile's of a row, and the probabilities that become of
// them: relative to the maximum of the tile, so that each tile has the whole range of e4m3.
namespace dlattn::wmma8 {

// Probabilities are times 2^kInt8Shift: the largest of a tile is 64, so that sums of their products
// with values fit fp16 (largest_value()).
constexpr int kInt8Shift = 6;

// The streaming softmax of a row over tiles whose scores are in units of their own. The row max is
// of scores to base 2.
struct TileSoftmax {
  float row_max = -INFINITY;
  float row_sum = 0.0f;  // of probabilities relative to it; this lane's part

  // The row max, or 0 for a row that has seen nothing, as tile::OnlineSoftmax has it.
  __device__ __forceinline__ float finite_max() const {
    return row_max == -INFINITY ? 0.0f : row_max;
  }
  // The weight of probabilities that are relative to `other_max`.
  __device__ __forceinline__ float weight(float other_max) const {
    return ptx::exp2(other_max - finite_max());
  }
};

// A tile of a row: its scores are biased integers, -inf where a key is hidden.
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
    if (largest == -INFINITY || scale < kLeast) this->scale = kLeast;
  }

  // The row max of the tile alone, to base 2.
  __device__ __forceinline__ float max() const { return (largest - kIntegerBias) * scale; }

  // P = 2^(S - the tile's max) in place, times 2^kInt8Shift. Returns this lane's part of their sum.
  template <int kGroups>
  __device__ __forceinline__ float probabilities(float (&acc_s)[kGroups][4], int h) const {
    const float base = largest == -INFINITY ? 0.0f : largest;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; ++e) {
        acc_s[j][e] = ptx::exp2(fmaf(acc_s[j][e] - base, scale, static_cast<float>(kInt8Shift)));
        sum += acc_s[j][e];
      }
    }
    return sum;
  }
};

// Makes scores of a sequence's products, with everything but what is a row's own.
struct Int8Scores {
  const AttentionParams& params;
  const QuantizedView& view;
  float scale_log2;  // softmax_scale, to base 2
  // Where the scales of the walk's first tile stand; those of the next one are before. 32 bits are
  // enough: keys and values of more scales would take terabytes.
  unsigned last_scale;
  // The position in the caller's mask.
  std::int64_t mask_start;  // of the head
  int first_row, seqlen_q;  // the warp's first row, counted from the sequence's

  // The scales of tile i of the walk.
  __device__ __forceinline__ float k_scale(int i) const { return view.k_scale[last_scale - i]; }
  __device__ __forceinline__ float v_scale(int i) const { return view.v_scale[last_scale - i]; }

  // Sets scores of keys that their rows do not see by position or by the caller's mask to -inf.
  template <int kGroups>
  __device__ __forceinline__ void apply_masks(float (&acc_s)[1][kGroups][4], const tile::Mask& mask,
                                              int tile, int lane) const {
    const int first_key = lane % 4 * 2;
    const std::int64_t step = params.mask.col_stride;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + 8 * h;
      const tile::Range visible = mask.row(row, first_key);
      const bool exists = first_row + row < seqlen_q;
      const std::uint8_t* const given = params.mask.data + mask_start +
                                        (first_row + row) * params.mask.row_stride +
                                        (tile * (8 * kGroups) + first_key) * step;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = 8 * j + e;
          // seed: given-mask
          if (!exists || !tile::contains(visible, key) || !given[key * step])
            acc_s[0][j][2 * h + e] = -INFINITY;
        }
      }
    }
  }
};

}  // namespace dlattn::wmma8
