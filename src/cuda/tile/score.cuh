#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::tile {

// What may stand between q.k and the softmax besides the scale: softcap, then ALiBi and bias, then
// the caller's mask.
template <typename T>
struct ScoreTerms {
  const AttentionParams& params;
  std::int64_t bias_start;  // element (batch, head, 0, 0)
  std::int64_t mask_start;
  float alibi_slope;
  bool any;

  __device__ __forceinline__ ScoreTerms(const AttentionParams& p, const Work& work)
      : params(p),
        bias_start(work.batch * p.bias_batch_stride + work.head * p.bias_head_stride),
        mask_start(work.batch * p.mask_batch_stride + work.head * p.mask_head_stride),
        alibi_slope(p.alibi_slopes ? p.alibi_slopes[work.batch * p.alibi_batch_stride +
                                                    work.head * p.alibi_head_stride]
                                   : 0.0f),
        any(p.softcap != 0.0 || p.bias || p.mask || p.alibi_slopes) {}

  // The score in base 2 of row i and key j, both of which exist; `shift` as in Sequence.
  __device__ __forceinline__ float operator()(float dot, int i, int j, int shift) const {
    if (params.mask &&
        !params.mask[mask_start + i * params.mask_row_stride + j * params.mask_col_stride])
      return -INFINITY;
    float score = dot * static_cast<float>(params.softmax_scale);
    if (params.softcap != 0.0) {
      const float cap = static_cast<float>(params.softcap);
      score = cap * tanhf(score / cap);
    }
    if (params.alibi_slopes) score -= alibi_slope * static_cast<float>(abs(i + shift - j));
    if (params.bias) {
      const std::int64_t at = bias_start + i * params.bias_row_stride + j * params.bias_col_stride;
      score += params.bias_dtype == DType::kFloat32
                   ? static_cast<const float*>(params.bias)[at]
                   : to_float(static_cast<const T*>(params.bias)[at]);
    }
    return score * kLog2e;
  }
};

}  // namespace dlattn::tile
