#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/ptx/math.cuh"
#include "cuda/sm90/loaded_terms.cuh"
#include "cuda/sm90/score_params.h"
#include "cuda/sm90/setup.cuh"
#include "cuda/sm90/softmax.cuh"
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

// The score terms of a lane's two rows of its warp's 16, in units of q.k, or natural ones where
// there is a bias.
template <typename T, Terms kTerms>
struct LaneTerms {
  static constexpr bool kMayLeap = false;  // whether many tiles in a row take their maxima first

  const AttentionParams& all;
  const ScoreParams& params;
  TermTiles<kTerms>& loaded;  // bias and mask of the tile at hand
  float softmax_scale;
  float scale;         // from what these units are to base 2
  bool one_side;       // whether rows see no keys beyond them
  bool large = false;  // whether softcap may have met scores of this warp that are not small
  float slope;         // ALiBi's
  // Of the scores at hand:
  float shift[2];  // base 2, what is still to be added to all of a row's
  bool uncapped;   // softcap is left to exponentiate()
  bool beyond;     // softcap took for small what was not

  __device__ __forceinline__ LaneTerms(const AttentionParams& p, const LaunchShape& shape,
                                       const ScoreParams& params, const tile::Work& work,
                                       TermTiles<kTerms>& loaded)
      : all(p),
        params(params),
        loaded(loaded),
        softmax_scale(shape.softmax_scale),
        scale(score_scale<kTerms>(p, shape)),
        one_side(shape.window_right <= 0),
        slope(p.alibi_slopes ? p.alibi_slopes[work.batch * p.alibi_batch_stride +
                                              work.head * p.alibi_head_stride] *
                                   params.slope_scale
                             : 0.0f) {}

  // All terms, on any scores. `position` is that of the consumer's first row, counted from the
  // tile's first key. All lanes call it.
  template <int kScores>
  __device__ __forceinline__ void apply(float (&acc_s)[kScores], int position) {
    shift[0] = shift[1] = 0.0f;
    uncapped = beyond = false;
    if (params.cap != 0.0f) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) acc_s[i] = softcap(acc_s[i], params.exponent, params.cap);
    }
    apply_loaded(acc_s);
    if (slope != 0.0f) add_distances(acc_s, lane_position(position));
  }

  // The same with less work: what ALiBi has for a row as a whole is left to exponentiate(), and
  // softcap takes scores for small ones until it has met others; alone, on a tile that is no edge,
  // it is done under the exponentials.
  template <int kScores>
  __device__ __forceinline__ void apply_quickly(float (&acc_s)[kScores], int position, bool edge) {
    shift[0] = shift[1] = 0.0f;
    beyond = false;
    uncapped = kTerms == Terms::kComputed && params.cap != 0.0f && slope == 0.0f && !large && !edge;
    if (params.cap != 0.0f && !uncapped) {
      if (large) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) acc_s[i] = softcap(acc_s[i], params.exponent, params.cap);
      } else {
        std::uint32_t exponents = 0;
#pragma unroll
        for (int i = 0; i < kScores; ++i)
          acc_s[i] *= small_tanh(acc_s[i], params.polynomial, &exponents);
        beyond = exponents != exponent_bits(params.bias);
      }
    }
    apply_loaded(acc_s);
    if (slope != 0.0f) {
      constexpr int kBlockN = kScores * 2;
      const bool after = position + kWarpgroupRows <= 0;
      const float lane = lane_position(position);
      if (one_side || after || position >= kBlockN - 1) {
        const float rising = after ? -slope : slope;
#pragma unroll
        for (int i = 0; i < kScores; ++i)
          acc_s[i] = fmaf(rising, static_cast<float>(key(i)), acc_s[i]);
        shift[0] = -rising * scale * lane;
        shift[1] = -rising * scale * (lane + 8.0f);
      } else {
        add_distances(acc_s, lane);
      }
    }
  }

  // As Softmax::exponentiate; sums tell of scores that are void, as of outgrown references.
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&acc_s)[kScores], const Softmax& softmax,
                                               float scale, float (&sums)[2]) {
    if (uncapped) return exponentiate_capped(acc_s, softmax, sums);
    const float neg_references[2] = {softmax.neg_reference[0] + shift[0],
                                     softmax.neg_reference[1] + shift[1]};
    Softmax::exponentiate(acc_s, scale, neg_references, sums);
    if (beyond) sums[0] = INFINITY;
  }

 private:
  // Of this lane's first row, minus its first key.
  __device__ __forceinline__ static float lane_position(int position) {
    const Place place;
    return static_cast<float>(position + place.warp * 16 + place.lane / 4 - place.lane % 4 * 2);
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

  // cap * tanh(x / cap) / x of an x that is small, without exponentials, times the scale of `a`;
  // `exponents` tells of one that is not.
  __device__ __forceinline__ float small_tanh(float x, const float (&a)[4],
                                              std::uint32_t* exponents) const {
    // From bias to twice that as long as scores are small, so that they share its exponent.
    const float w = fmaf(x, x, params.bias);
    *exponents |= exponent_bits(w);
    return fmaf(w, fmaf(w, fmaf(w, a[3], a[2]), a[1]), a[0]);
  }

  template <int kScores>
  __device__ __forceinline__ void exponentiate_capped(float (&acc_s)[kScores],
                                                      const Softmax& softmax, float (&sums)[2]) {
    float parts[4] = {};
    std::uint32_t exponents = 0;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float ratio = small_tanh(acc_s[i], params.polynomial_log2, &exponents);
      acc_s[i] = ptx::exp2(fmaf(acc_s[i], ratio, softmax.neg_reference[i / 2 % 2]));
      parts[i % 4] += acc_s[i];
    }
    sums[0] = parts[0] + parts[1];
    sums[1] = parts[2] + parts[3];
    if (exponents != exponent_bits(params.bias)) sums[0] = INFINITY;
  }
};

template <typename T>
struct LaneTerms<T, Terms::kNone> {
  static constexpr bool kMayLeap = true;
  bool large;  // of no interest

  __device__ __forceinline__ LaneTerms(const AttentionParams&, const LaunchShape&,
                                       const ScoreParams&, const tile::Work&, const NoTiles&) {}
  template <int kScores>
  __device__ __forceinline__ void apply(float (&)[kScores], int) const {}
  template <int kScores>
  __device__ __forceinline__ void apply_quickly(float (&)[kScores], int, bool) const {}
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&acc_s)[kScores], const Softmax& softmax,
                                               float scale, float (&sums)[2]) const {
    softmax.exponentiate(acc_s, scale, sums);
  }
};

}  // namespace dlattn::sm90
