#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/ptx/math.cuh"
#include "cuda/sm90/loaded_terms.cuh"
#include "cuda/sm90/score_params.h"
#include "cuda/sm90/setup.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/warp.cuh"

// What beside the scale stands between q.k and the softmax: softcap, then bias and ALiBi, then the
// caller's mask.
namespace dlattn::sm90 {

// cap * tanh(x / cap), given 2 log2(e) / cap; its error is some 2^-22 of cap.
__device__ __forceinline__ float softcap(float x, float exponent, float cap) {
  return cap - __fdividef(2.0f * cap, 1.0f + ptx::exp2(x * exponent));
}

// The exponent's bits of an fp32 number.
__device__ __forceinline__ std::uint32_t exponent_bits(float x) {
  std::uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & 0x7f800000u;
}

// What scores must be multiplied with, once their terms are applied, to be in base 2.
template <Terms kTerms>
__device__ __forceinline__ float score_scale(const AttentionParams& p, const LaunchShape& shape) {
  return kTerms == Terms::kLoaded && p.bias ? tile::kLog2e : shape.scale_log2;
}

// What became of a lane's scores: the references that their exponentials are relative to, negative,
// and whether the scores are void.
template <Terms kTerms>
struct Applied {
  float neg_references[2];
  bool void_scores;
};
template <>
struct Applied<Terms::kNone> {
  const float (&neg_references)[2];
  static constexpr bool void_scores = false;
};

// The score terms of a lane's two rows of its warp's 16, in units of q.k, or natural ones where
// there is a bias.
template <typename T, Terms kTerms>
struct LaneTerms {
  const AttentionParams& all;
  const ScoreParams& params;
  TermTiles<kTerms>& loaded;  // bias and mask of the tile at hand
  float softmax_scale;
  float scale;         // from what these units are to base 2
  int first_position;  // of the consumer's first row
  bool one_side;       // whether rows see no keys beyond them
  bool large = false;  // whether softcap has met scores of this warp that are not small
  float slope;         // ALiBi's

  __device__ __forceinline__ LaneTerms(const AttentionParams& p, const LaunchShape& shape,
                                       const ScoreParams& params, const tile::Work& work,
                                       int first_position, TermTiles<kTerms>& loaded)
      : all(p),
        params(params),
        loaded(loaded),
        softmax_scale(shape.softmax_scale),
        scale(score_scale<kTerms>(p, shape)),
        first_position(first_position),
        one_side(shape.window_right <= 0),
        slope(p.alibi_slopes ? p.alibi_slopes[work.batch * p.alibi_batch_stride +
                                              work.head * p.alibi_head_stride] *
                                   params.slope_scale
                             : 0.0f) {}

  // All terms, on any scores of a tile that begins at key n0. All lanes call it.
  template <int kScores>
  __device__ __forceinline__ void apply(float (&acc_s)[kScores], int n0) {
    if (params.cap != 0.0f) {
      std::uint32_t exponents = 0;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        exponents |= exponent_bits(fmaf(acc_s[i], acc_s[i], params.bias));
        acc_s[i] = softcap(acc_s[i], params.exponent, params.cap);
      }
      large |= __any_sync(tile::kFullMask, exponents != exponent_bits(params.bias));
    }
    apply_loaded(acc_s);
    if (slope != 0.0f) add_distances(acc_s, lane_position(n0));
  }

  // The same with less work: what ALiBi has for a row as a whole goes to its reference, and softcap
  // takes scores for small ones until it has met others.
  template <int kScores>
  __device__ __forceinline__ Applied<kTerms> apply_quickly(float (&acc_s)[kScores], int n0,
                                                           const float (&neg_references)[2]) const {
    Applied<kTerms> applied{{neg_references[0], neg_references[1]}, false};
    if (params.cap != 0.0f) {
      if (large) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) acc_s[i] = softcap(acc_s[i], params.exponent, params.cap);
      } else {
        applied.void_scores = cap_small(acc_s);
      }
    }
    apply_loaded(acc_s);
    if (slope != 0.0f) {
      constexpr int kBlockN = kScores * 2;
      const bool after = first_position + kWarpgroupRows <= n0;
      const float lane = lane_position(n0);
      if (one_side || after || first_position >= n0 + kBlockN - 1) {
        const float rising = after ? -slope : slope;
#pragma unroll
        for (int i = 0; i < kScores; ++i)
          acc_s[i] = fmaf(rising, static_cast<float>(key(i)), acc_s[i]);
        const float per_row = -rising * scale;
        applied.neg_references[0] = fmaf(per_row, lane, neg_references[0]);
        applied.neg_references[1] = fmaf(per_row, lane + 8.0f, neg_references[1]);
      } else {
        add_distances(acc_s, lane);
      }
    }
    return applied;
  }

 private:
  // Of this lane's first row, minus its first key.
  __device__ __forceinline__ float lane_position(int n0) const {
    const Place place;
    return static_cast<float>(first_position - n0 + place.warp * 16 + place.lane / 4 -
                              place.lane % 4 * 2);
  }
  // Of a lane's score, counted from its first.
  __device__ __forceinline__ static constexpr int key(int i) { return i / 4 * 8 + i % 2; }
  __device__ __forceinline__ static constexpr int row(int i) { return i / 2 % 2 * 8; }

  template <int kScores>
  __device__ __forceinline__ void add_distances(float (&acc_s)[kScores], float position) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      acc_s[i] = fmaf(-slope, fabsf(position + static_cast<float>(row(i) - key(i))), acc_s[i]);
  }

  template <int kScores>
  __device__ __forceinline__ void apply_loaded(float (&acc_s)[kScores]) const {
    if constexpr (kTerms == Terms::kLoaded) {
      static_assert(kScores == kTermKeys / 2, "tiles of terms are those of scores");
      if (params.bias_bytes == 2) add_bias<T>(acc_s, softmax_scale, loaded.bias());
      if (params.bias_bytes == 4) add_wide_bias(acc_s, softmax_scale, loaded.base, loaded.bias());
      if (all.mask) hide(acc_s, loaded.base, loaded.mask());
    }
  }

  // softcap of scores of which none is large, without exponentials; else true, and they are void.
  template <int kScores>
  __device__ __forceinline__ bool cap_small(float (&acc_s)[kScores]) const {
    std::uint32_t exponents = 0;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      // From bias to twice that as long as scores are small, so that they share its exponent.
      const float w = fmaf(acc_s[i], acc_s[i], params.bias);
      exponents |= exponent_bits(w);
      float y = fmaf(w, params.polynomial[3], params.polynomial[2]);
      y = fmaf(w, y, params.polynomial[1]);
      y = fmaf(w, y, params.polynomial[0]);
      acc_s[i] *= y;
    }
    return exponents != exponent_bits(params.bias);
  }
};

template <typename T>
struct LaneTerms<T, Terms::kNone> {
  __device__ __forceinline__ LaneTerms(const AttentionParams&, const LaunchShape&,
                                       const ScoreParams&, const tile::Work&, int, const NoTiles&) {
  }
  template <int kScores>
  __device__ __forceinline__ void apply(float (&)[kScores], int) const {}
  template <int kScores>
  __device__ __forceinline__ Applied<Terms::kNone> apply_quickly(
      float (&)[kScores], int, const float (&neg_references)[2]) const {
    return {neg_references};
  }
};

}  // namespace dlattn::sm90
