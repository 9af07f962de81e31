#pragma once

#include <cmath>
#include <type_traits>

#include "cuda/forward/sm90/traits.h"
#include "dlattn/forward.h"

// The score modification's parameters in the kernels: plain host code, which the plan asks too.
namespace dlattn::sm90 {

inline ScoreMod score_mod_of(const AttentionParams& p) {
  if (p.bias.data || p.mask.data) return ScoreMod::kBiasMask;
  return p.softcap != 0.0 || p.alibi_slopes.data ? ScoreMod::kComputed : ScoreMod::kNone;
}

// The kernel for a problem's scores; of plain ones, that of tall blocks.
inline Variant variant_of(const AttentionParams& p) {
  switch (score_mod_of(p)) {
    case ScoreMod::kComputed:
      return Variant::kComputed;
    case ScoreMod::kBiasMask:
      return Variant::kLoaded;
    default:
      return Variant::kTall;
  }
}

// Calls run(variant, varlen) with a plan's, as compile-time constants.
template <int kHeadDim, typename Run>
void with_kernel(Variant variant, bool varlen, Run run) {
  const auto with_variant = [&](auto constant) {
    if (varlen) return run(constant, std::true_type{});
    run(constant, std::false_type{});
  };
  switch (variant) {
    case Variant::kTall:
      return with_variant(std::integral_constant<Variant, Variant::kTall>{});
    case Variant::kComputed:  // of all lengths (serves_all_lengths())
      return run(std::integral_constant<Variant, Variant::kComputed>{}, std::true_type{});
    case Variant::kLoaded:  // the plan refuses it with varlen
      return run(std::integral_constant<Variant, Variant::kLoaded>{}, std::false_type{});
    case Variant::kShort:  // the same
      if constexpr (has_short_blocks(kHeadDim))
        return run(std::integral_constant<Variant, Variant::kShort>{}, std::false_type{});
      return;
    case Variant::kPairs:  // the same
      if constexpr (has_pairs(kHeadDim))
        return run(std::integral_constant<Variant, Variant::kPairs>{}, std::false_type{});
  }
}

// The same for the kernels of keys in a cache: run(variant).
template <int kHeadDim, typename Run>
void with_cached_kernel(Variant variant, Run run) {
  if constexpr (reads_caches(kHeadDim, Variant::kTall)) {
    if (variant == Variant::kShort) return run(std::integral_constant<Variant, Variant::kShort>{});
    run(std::integral_constant<Variant, Variant::kTall>{});
  }
}

// tanh(x) / x of x = score / cap where x is small: a polynomial in w = score^2 + offset. `offset`
// is a power of two, whose exponent w shares unless x is too large (score.cuh).
template <int kDegree>
struct TanhRatio {
  float offset;
  float coefficients[kDegree + 1];
};

// In the kernels scores are in units of q.k until the softmax scales them, and so is softcap's cap.
// Bias makes them natural, and so does ALiBi, but on tiles to which it adds the keys' share alone.
struct ScoreParams {
  float cap;  // softcap in these units; 0: off
  float inverse_cap;
  TanhRatio<4> small;
  TanhRatio<2> smaller_log2;  // the two of these times softmax_scale * log2(e)
  TanhRatio<4> small_log2;
  // Scores before ALiBi are in units of q.k or, with a bias, natural:
  float natural_scale;  // makes them natural
  float slope_scale;    // makes slopes of their units
  // The stages of bias and mask.
  int bias_bytes;   // of an element, 0: no bias
  int stage_bytes;  // of a consumer's tiles
  int stages;       // of them
};

// Least-maximum fits of tanh(x) / x, in powers of x^2, for x, the score as a part of cap, up to
// `most`: to 1.1e-7 and 3.3e-8 of itself, so that softcap costs a score its last digit at most,
// however large the cap.
template <int kDegree>
struct TanhFit {
  double most;
  double coefficients[kDegree + 1];
};
constexpr TanhFit<2> kSmallerTanh = {0.2, {0.99999989479, -0.33328590965, 0.13015409108}};
constexpr TanhFit<4> kSmallTanh = {
    0.55, {0.99999996764, -0.33332795014, 0.13318876726, -0.05258930807, 0.01631542137}};

// Ratios of softcap to softmax_scale that the polynomial's coefficients do not overflow with.
constexpr double kLeastCap = 0x1p-14, kLargestCap = 0x1p14;
// And the least softmax_scale for which slopes, in the kernels' units, do not.
constexpr double kLeastScale = 0x1p-20;

// Bytes of an element of bias; 0 without one.
inline int bias_bytes(const AttentionParams& p) {
  return p.bias.data ? static_cast<int>(size_of(p.bias.dtype)) : 0;
}

// Bytes of a consumer's tiles of bias and mask.
inline int stage_bytes(const AttentionParams& p) {
  return kBiasMaskRows * kBiasMaskKeys * (bias_bytes(p) + (p.mask.data ? 1 : 0));
}

// How many of them are in flight: what a thread block has room for.
inline int bias_mask_stages(const AttentionParams& p, int head_dim_tile) {
  const int tile_v = head_dim_v_tile(head_dim_tile, p.head_dim_v);
  const int consumers = tile_shape(head_dim_tile, tile_v, Variant::kLoaded).num_consumers;
  const int room = kMaxSmem - smem_map(head_dim_tile, tile_v, Variant::kLoaded).total;
  return room >= kBiasMaskStages * consumers * stage_bytes(p) ? kBiasMaskStages : 1;
}

// Bytes of shared memory for them.
inline int bias_mask_bytes(const AttentionParams& p, int head_dim_tile) {
  const int tile_v = head_dim_v_tile(head_dim_tile, p.head_dim_v);
  const int consumers = tile_shape(head_dim_tile, tile_v, Variant::kLoaded).num_consumers;
  return bias_mask_stages(p, head_dim_tile) * consumers * stage_bytes(p);
}

// In the kernels' scores, of which `cap` of these makes the cap; times `scale`.
template <int kDegree>
TanhRatio<kDegree> tanh_ratio(const TanhFit<kDegree>& fit, double cap, double scale) {
  const double offset = std::exp2(std::floor(std::log2(fit.most * fit.most * cap * cap)));
  const double step = 1.0 / (cap * cap), start = offset * step;  // x^2 = step w - start
  double shifted[kDegree + 1];                                   // in powers of step w
  for (int i = 0; i <= kDegree; ++i) shifted[i] = fit.coefficients[i];
  for (int done = 0; done < kDegree; ++done) {
    for (int i = kDegree - 1; i >= done; --i) shifted[i] -= start * shifted[i + 1];
  }
  TanhRatio<kDegree> ratio{static_cast<float>(offset), {}};
  for (int i = 0; i <= kDegree; ++i, scale *= step)
    ratio.coefficients[i] = static_cast<float>(shifted[i] * scale);
  return ratio;
}

inline ScoreParams score_params(const AttentionParams& p, int head_dim_tile) {
  constexpr double kLog2e = 1.4426950408889634;
  ScoreParams s{};
  const double natural = p.bias.data ? 1.0 : p.softmax_scale;
  s.natural_scale = static_cast<float>(natural);
  s.slope_scale = static_cast<float>(1.0 / natural);
  if (p.bias.data || p.mask.data) {
    s.bias_bytes = bias_bytes(p);
    s.stage_bytes = stage_bytes(p);
    s.stages = bias_mask_stages(p, head_dim_tile);
  }
  if (p.softcap == 0.0) return s;
  const double cap = p.softcap / p.softmax_scale;
  s.cap = static_cast<float>(cap);
  s.inverse_cap = static_cast<float>(1.0 / cap);
  s.small = tanh_ratio(kSmallTanh, cap, 1.0);
  s.smaller_log2 = tanh_ratio(kSmallerTanh, cap, p.softmax_scale * kLog2e);
  s.small_log2 = tanh_ratio(kSmallTanh, cap, p.softmax_scale * kLog2e);
  return s;
}

}  // namespace dlattn::sm90
