#pragma once

#include <cmath>
#include <type_traits>

#include "cuda/sm90/traits.h"
#include "dlattn/params.h"

// What the kernels with score terms are told of them: plain host code, which the plan asks too.
namespace dlattn::sm90 {

inline Terms terms_of(const AttentionParams& p) {
  if (p.bias || p.mask) return Terms::kLoaded;
  return p.softcap != 0.0 || p.alibi_slopes ? Terms::kComputed : Terms::kNone;
}

// Calls run(terms, varlen) with them and whether sequences are packed, as compile-time constants.
template <typename Run>
void with_kernel(const AttentionParams& p, Run run) {
  const auto with_terms = [&](auto terms) {
    if (p.cu_seqlens_q) return run(terms, std::true_type{});
    run(terms, std::false_type{});
  };
  switch (terms_of(p)) {
    case Terms::kNone:
      return with_terms(std::integral_constant<Terms, Terms::kNone>{});
    case Terms::kComputed:
      return with_terms(std::integral_constant<Terms, Terms::kComputed>{});
    case Terms::kLoaded:  // of packed sequences the plan refuses them
      return run(std::integral_constant<Terms, Terms::kLoaded>{}, std::false_type{});
  }
}

// In the kernels scores are products q.k until the softmax, and so are the terms; but natural from
// the bias on, if there is one.
struct ScoreParams {
  float cap;       // softcap in these units; 0: off
  float exponent;  // 2 log2(e) / cap
  // tanh(x) / x of x = score / cap, where x is small: a polynomial in score^2 + bias, whose
  // exponent, in binary, is that of `bias` unless x is too large (score.cuh).
  float bias;
  float polynomial[4], polynomial_log2[4];  // the latter times softmax_scale * log2(e)
  float slope_scale;                        // of ALiBi's slopes
  // Of bias and mask.
  int bias_bytes;   // of an element, 0: no bias
  int stage_bytes;  // of a consumer's tiles
  int stages;       // of them
};

// Scores up to which magnitude, as a part of cap, the polynomial is good for: to 1.3e-7 of cap.
constexpr double kSmallTanh = 0.5;
// Least-maximum fit of tanh(x) / x, in powers of x^2, over that range.
constexpr double kTanh[] = {0.9999976761831236, -0.33320655180290376, 0.13145145295309965,
                            -0.043372474100809195};

// Ratios of softcap to softmax_scale that the polynomial's coefficients do not overflow with.
constexpr double kLeastCap = 0x1p-16, kLargestCap = 0x1p16;
// And the least softmax_scale for which slopes, in the kernels' units, do not.
constexpr double kLeastScale = 0x1p-40;

// Bytes of an element of bias; 0 without one.
inline int bias_bytes(const AttentionParams& p) {
  return p.bias ? static_cast<int>(size_of(p.bias_dtype)) : 0;
}

// Bytes of a consumer's tiles of bias and mask.
inline int stage_bytes(const AttentionParams& p) {
  return kTermRows * kTermKeys * (bias_bytes(p) + (p.mask ? 1 : 0));
}

// How many of them are in flight: what a thread block has room for.
inline int term_stages(const AttentionParams& p, int head_dim_tile) {
  const int tile_v = head_dim_v_tile(head_dim_tile, p.head_dim_v);
  const int consumers = tile_shape(head_dim_tile, tile_v, Terms::kLoaded).num_consumers;
  const int room = kMaxSmem - smem_map(head_dim_tile, tile_v, Terms::kLoaded).total;
  return room >= kTermStages * consumers * stage_bytes(p) ? kTermStages : 1;
}

// Bytes of shared memory for them.
inline int term_bytes(const AttentionParams& p, int head_dim_tile) {
  const int tile_v = head_dim_v_tile(head_dim_tile, p.head_dim_v);
  const int consumers = tile_shape(head_dim_tile, tile_v, Terms::kLoaded).num_consumers;
  return term_stages(p, head_dim_tile) * consumers * stage_bytes(p);
}

inline ScoreParams score_params(const AttentionParams& p, int head_dim_tile) {
  constexpr double kLog2e = 1.4426950408889634;
  ScoreParams s{};
  s.slope_scale = p.bias ? 1.0f : static_cast<float>(1.0 / p.softmax_scale);
  if (p.bias || p.mask) {
    s.bias_bytes = bias_bytes(p);
    s.stage_bytes = stage_bytes(p);
    s.stages = term_stages(p, head_dim_tile);
  }
  if (p.softcap == 0.0) return s;
  const double cap = p.softcap / p.softmax_scale;
  const double bias = std::exp2(std::floor(std::log2(kSmallTanh * kSmallTanh * cap * cap)));
  // With w = score^2 + bias, x^2 = step w - start.
  const double step = 1.0 / (cap * cap), start = bias * step;
  const double* a = kTanh;
  s.cap = static_cast<float>(cap);
  s.exponent = static_cast<float>(2.0 * kLog2e / cap);
  s.bias = static_cast<float>(bias);
  const double polynomial[4] = {
      a[0] - start * (a[1] - start * (a[2] - start * a[3])),
      step * (a[1] - start * (2 * a[2] - start * 3 * a[3])),
      step * step * (a[2] - 3 * start * a[3]),
      step * step * step * a[3],
  };
  for (int i = 0; i < 4; ++i) {
    s.polynomial[i] = static_cast<float>(polynomial[i]);
    s.polynomial_log2[i] = static_cast<float>(polynomial[i] * p.softmax_scale * kLog2e);
  }
  return s;
}

}  // namespace dlattn::sm90
