#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/forward/sm90/bias_mask.cuh"
#include "cuda/forward/sm90/score_params.h"
#include "cuda/forward/sm90/setup.cuh"
#include "cuda/forward/sm90/softmax.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/warp.cuh"

// The score modification in sm90: softcap, then bias and ALiBi, then the caller's mask.
namespace dlattn::sm90 {

// The exponent's bits of an fp32 number.
__device__ __forceinline__ std::uint32_t exponent_bits(float x) {
  std::uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & 0x7f800000u;
}

// The factor that puts scores in base 2 before ALiBi, if there is any.
template <ScoreMod kScoreMod>
__device__ __forceinline__ float score_scale(const AttentionParams& p, const LaunchShape& shape) {
  return kScoreMod == ScoreMod::kBiasMask && p.bias.data ? tile::kLog2e : shape.scale_log2;
}

// The score modification of a lane's two rows of its warp's 16. Scores are in units of q.k until
// bias or ALiBi makes them natural.
template <typename T, ScoreMod kScoreMod>
struct LaneScoreMod {
  // Whether many tiles in a row may take their maxima first.
  static constexpr bool kMayOverflow = false;

  // In base 2 and by key; 64 keys of it are as many digits as scores have anyway.
  static constexpr float kSteepSlope = 0.25f;
  // In base 2: a row's whole share up to this has digits enough when it is rounded with the
  // row max, tile by tile.
  static constexpr float kMostShift = 1024.0f;

  const AttentionParams& all;
  const ScoreParams& params;
  BiasMaskSource<kScoreMod>& bias_mask;  // bias and mask of the tile at hand
  float softmax_scale;
  const float& scale_before;  // of scores before ALiBi, to base 2
  float slope;                // ALiBi's, natural
  float scale;                // of the scores of apply(), to base 2
  // How large the scores are that softcap has met: what it may take the warp's next ones for. The
  // softmax keeps it.
  enum Size : unsigned { kSmaller, kSmall, kLarge };
  // The state of the scores at hand:
  float shift[2];    // base 2, what is still to be added to all of a row's
  float tile_scale;  // of this tile, to base 2
  bool uncapped;     // softcap is left to exponentiate()
  bool beyond;       // softcap took for small what was not

  __device__ __forceinline__ LaneScoreMod(const AttentionParams& p, const LaunchShape& shape,
                                          const ScoreParams& params, const tile::WorkTile& work,
                                          const float& scale_before,
                                          BiasMaskSource<kScoreMod>& bias_mask)
      : all(p),
        params(params),
        bias_mask(bias_mask),
        softmax_scale(shape.softmax_scale),
        scale_before(scale_before),
        slope(tile::alibi_slope(p, work)),
        scale(slope != 0.0f ? tile::kLog2e : scale_before) {}

  // Whether scores may be so small that a scaled row max does not tell them from -inf.
  __device__ __forceinline__ bool may_hide_tiny_scores() const {
    return kScoreMod == ScoreMod::kBiasMask && params.bias_bytes != 0;
  }
  // Takes scores for larger ones than it has.
  __device__ __forceinline__ static void expect_larger(Softmax& softmax) {
    softmax.set_met(softmax.met() == kSmaller ? kSmall : kLarge);
  }

  // Softcap, bias, ALiBi and mask. `position` is that of the consumer's first row, counted from the
  // tile's first key. Without `exact`, which takes any scores, with less work: what ALiBi has for a
  // row as a whole is left to exponentiate(), and softcap takes scores for small ones until it has
  // met others; alone, on a tile that is no edge, it is done under the exponentials. All lanes call
  // it.
  template <int kScores>
  __device__ __forceinline__ void apply(float (&acc_s)[kScores], const Softmax& softmax,
                                        int position, bool edge, bool exact) {
    shift[0] = shift[1] = 0.0f;
    tile_scale = scale;
    beyond = false;
    const bool capped = params.cap != 0.0f;
    const bool any_size = exact || softmax.met() == kLarge;
    uncapped = kScoreMod == ScoreMod::kComputed && capped && slope == 0.0f && !any_size && !edge;
    if (capped && !uncapped) {
      if (any_size) {
        cap_any(acc_s);
      } else {
        std::uint32_t exponents = 0;
#pragma unroll
        for (int i = 0; i < kScores; ++i)
          acc_s[i] *= tanh_ratio(acc_s[i], params.small, &exponents);
        beyond = exponents != exponent_bits(params.small.offset);
      }
    }
    apply_bias_mask(acc_s);
    if (slope != 0.0f) {
      constexpr int kBlockN = kScores * 2;
      const bool after = position + kWarpgroupRows <= 0;
      const float lane = lane_position(position);
      // Counted from the tile's first key the last ones, which may be the nearest, count most.
      // Where that would cost digits, it is done to tiles further away alone.
      const float steepness = fabsf(slope) * tile::kLog2e;
      const bool steep = steepness > kSteepSlope;
      const bool before = position >= kBlockN - 1 && (!steep || position >= 2 * kBlockN - 1);
      const float furthest = static_cast<float>(abs(position) + kBlockN + kWarpgroupRows);
      if (!exact && (before || after) && steepness * furthest <= kMostShift) {
        // seed: slope-sign
        const float rising = after ? -slope : slope;
        const float down = -rising * tile::kLog2e;
        shift[0] = down * lane;
        // seed: second-row
        shift[1] = fmaf(down, 8.0f, shift[0]);
        // Scores keep their units here: one FFMA each.
        tile_scale = scale_before;
        const float per_key = rising * params.slope_scale;
#pragma unroll
        for (int i = 0; i < kScores; ++i)
          acc_s[i] = fmaf(per_key, static_cast<float>(key(i)), acc_s[i]);
      } else {
        add_distances(acc_s, lane);
      }
    }
  }

  // As Softmax::exponentiate; sums tell of scores that are void, as of row maxima that do not fit.
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&acc_s)[kScores], const Softmax& softmax,
                                               float (&sums)[2]) {
    if (uncapped) {
      if (softmax.met() == kSmaller)
        return exponentiate_capped(acc_s, softmax, params.smaller_log2, sums);
      return exponentiate_capped(acc_s, softmax, params.small_log2, sums);
    }
    // Scores of unscaled row maxima are relative to these already, and have no shift.
    const float negs[2] = {softmax.unscaled() ? 0.0f : softmax.row_max_words[0] + shift[0],
                           softmax.unscaled() ? 0.0f : softmax.row_max_words[1] + shift[1]};
    Softmax::exponentiate(acc_s, tile_scale, negs, sums);
    // seed: softcap-range
    if (beyond) sums[0] = INFINITY;
  }

 private:
  // The position of this lane's first row, minus that of its first key.
  __device__ __forceinline__ static float lane_position(int position) {
    const ThreadIndex thread;
    return static_cast<float>(position + thread.warp * 16 + thread.lane / 4 - thread.lane % 4 * 2);
  }
  // The key and the row of a lane's score, counted from its first.
  __device__ __forceinline__ static constexpr int key(int i) { return i / 4 * 8 + i % 2; }
  __device__ __forceinline__ static constexpr int row(int i) { return i / 2 % 2 * 8; }

  // Makes scores natural. Penalties are rounded before they are taken from them, so that keys at
  // one distance have one.
  template <int kScores>
  __device__ __forceinline__ void add_distances(float (&acc_s)[kScores], float position) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      acc_s[i] = fmaf(acc_s[i], params.natural_scale,
                      -__fmul_rn(slope, fabsf(position + static_cast<float>(row(i) - key(i)))));
  }

  template <int kScores>
  __device__ __forceinline__ void apply_bias_mask(float (&acc_s)[kScores]) const {
    if constexpr (kScoreMod == ScoreMod::kBiasMask) {
      static_assert(kScores == kBiasMaskKeys / 2, "tiles of bias and mask are those of scores");
      if (params.bias_bytes == 2) add_bias<T>(acc_s, softmax_scale, bias_mask.bias());
      if (params.bias_bytes == 4)
        add_wide_bias(acc_s, softmax_scale, bias_mask.base, bias_mask.bias());
      if (all.mask.data) hide(acc_s, bias_mask.base, bias_mask.mask());
    }
  }

  // Softcap of any scores.
  template <int kScores>
  __device__ __forceinline__ void cap_any(float (&acc_s)[kScores]) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      acc_s[i] = params.cap * tile::tanh(acc_s[i] * params.inverse_cap);
  }

  // cap * tanh(x / cap) / x of an x that is small, without exponentials; `exponents` tells of one
  // that is not.
  template <int kDegree>
  __device__ __forceinline__ static float tanh_ratio(float x, const TanhRatio<kDegree>& ratio,
                                                     std::uint32_t* exponents) {
    // From offset to twice that as long as scores are small, so that they share its exponent.
    const float w = fmaf(x, x, ratio.offset);
    *exponents |= exponent_bits(w);
    float sum = ratio.coefficients[kDegree];
#pragma unroll
    for (int i = kDegree - 1; i >= 0; --i) sum = fmaf(w, sum, ratio.coefficients[i]);
    return sum;
  }

  template <int kDegree, int kScores>
  __device__ __forceinline__ void exponentiate_capped(float (&acc_s)[kScores],
                                                      const Softmax& softmax,
                                                      const TanhRatio<kDegree>& ratio,
                                                      float (&sums)[2]) const {
    float parts[4] = {};
    std::uint32_t exponents = 0;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      acc_s[i] = ptx::exp2(fmaf(acc_s[i], tanh_ratio(acc_s[i], ratio, &exponents),
                                softmax.row_max_words[i / 2 % 2]));
      parts[i % 4] += acc_s[i];
    }
    sums[0] = parts[0] + parts[1];
    sums[1] = parts[2] + parts[3];
    // seed: softcap-exponents
    if (exponents != exponent_bits(ratio.offset)) sums[0] = INFINITY;
  }
};

template <typename T>
struct LaneScoreMod<T, ScoreMod::kNone> {
  static constexpr bool kMayOverflow = true;

  const float& scale;  // of scores, to base 2

  __device__ __forceinline__ LaneScoreMod(const AttentionParams&, const LaunchShape&,
                                          const ScoreParams&, const tile::WorkTile&,
                                          const float& scale, const NoBiasMask&)
      : scale(scale) {}
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&acc_s)[kScores], const Softmax& softmax,
                                               float (&sums)[2]) const {
    softmax.exponentiate(acc_s, scale, sums);
  }
};

}  // namespace dlattn::sm90
