#pragma once

#include <cmath>
#include <cstdint>

#include "core/problem/score.h"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::tile {

// The head's ALiBi slope, limited; 0 if there is none.
__device__ __forceinline__ float alibi_slope(const AttentionParams& p, const WorkTile& work) {
  if (!p.alibi_slopes.data) return 0.0f;
  return limited_slope(p.alibi_slopes.data[work.batch * p.alibi_slopes.batch_stride +
                                           work.head * p.alibi_slopes.head_stride]);
}

// A minimax polynomial near 0, and exponentials, which are exact relative to 1, beyond. The error
// is some 2^-22 of the result at every size.
__device__ __forceinline__ float tanh(float x) {
  const float w = x * x;
  float sum = 0.0164374352f;
  sum = fmaf(w, sum, -0.0526717395f);
  sum = fmaf(w, sum, 0.133207239f);
  sum = fmaf(w, sum, -0.333329466f);
  const float near_zero = fmaf(x * w, sum, x);
  const float power = ptx::exp2(fabsf(x) * (2.0f * kLog2e));
  const float beyond = copysignf(1.0f - __fdividef(2.0f, 1.0f + power), x);
  return fabsf(x) < 0.55f ? near_zero : beyond;
}

// A natural score less the natural lse of its row. No score exceeds it but by rounding, which at
// -1e9 is by 64.
__device__ __forceinline__ float less_lse(float score, float lse) {
  const float power = score - lse;
  return power > 0.0f ? 0.0f : power;
}

// The score modification of one head, as core/problem/score.h defines it: softcap, ALiBi, bias, and
// the caller's mask.
template <typename T>
struct HeadScoreMod {
  const AttentionParams& params;
  std::int64_t bias_start;  // element (batch, head, 0, 0)
  std::int64_t mask_start;
  float alibi_slope;
  bool any;

  __device__ __forceinline__ HeadScoreMod(const AttentionParams& p, const WorkTile& work)
      : params(p),
        bias_start(work.batch * p.bias.batch_stride + work.head * p.bias.head_stride),
        mask_start(work.batch * p.mask.batch_stride + work.head * p.mask.head_stride),
        alibi_slope(tile::alibi_slope(p, work)),
        any(p.softcap != 0.0 || p.bias.data || p.mask.data || p.alibi_slopes.data) {}

  // The natural score of row i and key j, both of which exist; `shift` as in Sequence.
  __device__ __forceinline__ float operator()(float dot, int i, int j, int shift) const {
    if (params.mask.data &&
        !params.mask.data[mask_start + i * params.mask.row_stride + j * params.mask.col_stride])
      return -INFINITY;
    float score = softcapped(dot * static_cast<float>(params.softmax_scale),
                             static_cast<float>(params.softcap), [](float x) { return tanhf(x); });
    if (params.alibi_slopes.data) {
      const auto distance = static_cast<float>(i + shift - j);
      score = __fadd_rn(score, -alibi_penalty(alibi_slope, distance));
    }
    if (params.bias.data) {
      const std::int64_t at = bias_start + i * params.bias.row_stride + j * params.bias.col_stride;
      score += params.bias.dtype == DType::kFloat32
                   ? static_cast<const float*>(params.bias.data)[at]
                   : to_float(static_cast<const T*>(params.bias.data)[at]);
    }
    return score;
  }
};

}  // namespace dlattn::tile
