#pragma once

#include "cuda/tile/row_max.cuh"
#include "cuda/tile/warp.cuh"
#include "cuda/tile/wgmma/accumulators.cuh"

namespace dlattn::tile::wgmma {

// The streaming softmax of this lane's two rows of its warp's 16, with a speculative row max:
// probabilities are computed relative to a row max that may be stale, and the tile's maximum is not
// computed. The sums, which are needed anyway, tell whether the row max still fits, and by how much
// it does not: then it is raised and the probabilities, still in fp32, are scaled down. Where they
// overflowed fp32, the tile's scores are recomputed and the row max becomes their maximum, as in a
// plain softmax. Tiles after a rise that large begin so, and those of a warp with an unscaled row
// max (tile/row_max.cuh, where a row max is a RowMax). The row max cancels in out and lse.
// Scores here are raw products q.k, or natural ones; `scale` makes them base 2. kScores: the lane's
// scores of a tile, [4 j + 2 h + e] of row h. Range has the bounds of probabilities: kMaxSum,
// kFirstExponent, kSumExponent, kMostScaled and kToPower.
template <typename Range>
struct RangedSoftmax {
  float row_max_words[2] = {tile::kNothing, tile::kNothing};  // the row maxima, each a tile::RowMax
  float row_sum[2] = {0.0f, 0.0f};                            // this lane's part
  // The mode of the warp. In one word: registers are scarce.
  enum Mode {
    kScaled,
    kOverflowed,  // row maxima rose so far that the next tile's may overflow
    kUnscaled     // words are row maxima in the scores' units
  };
  unsigned state = kScaled;  // a mode, and how large softcap's scores have been

  static constexpr unsigned kModes = 4;
  __device__ __forceinline__ unsigned mode() const { return state % kModes; }
  __device__ __forceinline__ void set_mode(unsigned mode) {
    state = state / kModes * kModes + mode;
  }
  __device__ __forceinline__ unsigned met() const { return state / kModes; }
  __device__ __forceinline__ void set_met(unsigned met) { state = mode() + met * kModes; }

  // Has row maxima in the scores' units count where the next tile's units are 1 / ratio of the last
  // one's: a power of two, so that nothing is rounded.
  __device__ __forceinline__ void change_units(float ratio) {
    if (!unscaled()) return;
#pragma unroll
    for (float& word : row_max_words) word *= ratio;
  }

  // Whether the next tile's maxima are computed first.
  __device__ __forceinline__ bool raises_first() const { return mode() != kScaled; }
  __device__ __forceinline__ bool unscaled() const { return mode() == kUnscaled; }

  // Raises a row max that a score exceeds to the row's maximum. Where one of the warp's is or
  // becomes unscaled, leaves the scores relative to them. `factors`: what the rows have accumulated
  // must be multiplied with; the sums are. All lanes call it.
  template <int kScores>
  __device__ __forceinline__ void raise(float (&acc_s)[kScores], float scale, float (&factors)[2]) {
    const float maxima[2] = {row_max(acc_s, 0), row_max(acc_s, 1)};
    // A row that sees nothing, or NaN alone, keeps what it has.
    const float next[2] = {fminf(row_max_words[0], word_of(maxima[0], scale)),
                           fminf(row_max_words[1], word_of(maxima[1], scale))};
    const bool beyond = unscaled() || is_beyond_scaled(next[0]) || is_beyond_scaled(next[1]);
    if (__builtin_expect(__any_sync(tile::kFullMask, beyond), 0))
      return raise_any(acc_s, maxima, scale, false, factors);
    set_mode(kScaled);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factors[h] = ptx::exp2(next[h] - row_max_words[h]);
      row_max_words[h] = next[h];
      row_sum[h] *= factors[h];
    }
  }

  // The first tile's scores to probabilities and their sums, relative to those rows' maxima.
  // Scores are needed until a vote says that row maxima can be scaled, so probabilities have
  // registers of their own: then rows overlap. All lanes call it.
  template <int kScores>
  __device__ __forceinline__ void begin(float (&acc_s)[kScores], float scale,
                                        float (&probabilities)[kScores], float (&sums)[2]) {
    bool beyond = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_max_words[h] = fminf(tile::kNothing, word_of(row_max(acc_s, h), scale));
      beyond |= is_beyond_scaled(row_max_words[h]);
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) probabilities[i] = acc_s[i];
    exponentiate(probabilities, scale, row_max_words, sums);
    if (__any_sync(tile::kFullMask, beyond)) {
      row_max_words[0] = row_max_words[1] = tile::kNothing;
      float factors[2];
      raise_any(acc_s, scale, false, factors);
      exponentiate_raised(acc_s, scale, sums);
#pragma unroll
      for (int i = 0; i < kScores; ++i) probabilities[i] = acc_s[i];
    }
    add(sums);
  }

  // To be called after raise() but for the first tile's: has the next tile's scores raise
  // maxima first if row maxima were raised so far that these may well be beyond what fp32 holds of
  // them. All lanes call it.
  __device__ __forceinline__ void expect_overflow(const float (&factors)[2]) {
    constexpr float kFarRise = 0x1p-60f;
    const bool overflowed =
        __any_sync(tile::kFullMask, factors[0] < kFarRise || factors[1] < kFarRise);
    if (overflowed && !unscaled()) set_mode(kOverflowed);
  }

  // The same for scores of any size and row maxima of either kind. `may_hide_tiny_scores`: of
  // tile::RaisedRowMax.
  template <int kScores>
  __device__ __forceinline__ void raise_any(float (&acc_s)[kScores], float scale,
                                            bool may_hide_tiny_scores, float (&factors)[2]) {
    raise_any(acc_s, {row_max(acc_s, 0), row_max(acc_s, 1)}, scale, may_hide_tiny_scores, factors);
  }

  // Scores to probabilities, in place, and their sums, relative to scaled row maxima.
  template <int kScores>
  __device__ __forceinline__ static void exponentiate(float (&acc_s)[kScores], float scale,
                                                      const float (&negs)[2], float (&sums)[2]) {
    float parts[4] = {};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      acc_s[i] = ptx::exp2(fmaf(acc_s[i], scale, negs[i / 2 % 2]));
      parts[i % 4] += acc_s[i];
    }
    sums[0] = parts[0] + parts[1];
    sums[1] = parts[2] + parts[3];
  }

  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&acc_s)[kScores], float scale,
                                               float (&sums)[2]) const {
    exponentiate(acc_s, scale, row_max_words, sums);
  }

  // The same after raise(), whatever the row maxima are.
  template <int kScores>
  __device__ __forceinline__ void exponentiate_raised(float (&acc_s)[kScores], float scale,
                                                      float (&sums)[2]) const {
    const float negs[2] = {unscaled() ? 0.0f : row_max_words[0],
                           unscaled() ? 0.0f : row_max_words[1]};
    exponentiate(acc_s, scale, negs, sums);
  }

  // Whether the row max of one of the warp's rows does not fit. All lanes call it.
  __device__ __forceinline__ bool overflows(const float (&sums)[2]) const {
    return __any_sync(tile::kFullMask, sums[0] > Range::kMaxSum || sums[1] > Range::kMaxSum);
  }

  // Raises the row maxima of the rows whose sums are beyond Range::kSumExponent, so far that these
  // have it, or at most one less, and scales probabilities and sums to them. `factors` as above.
  // Does nothing and returns false where that cannot be done to one of the warp's. All lanes call
  // it.
  template <int kScores>
  __device__ __forceinline__ bool scale_down(float (&probabilities)[kScores], float (&sums)[2],
                                             float (&factors)[2]) {
    // seed: sums-of-rows
    const float row_sums[2] = {tile::reduce_sum<4>(sums[0]), tile::reduce_sum<4>(sums[1])};
    const auto lost = [&](int h) {
      // seed: may-scale
      return row_sums[h] > tile::kLargest || !tile::can_raise(row_max_words[h], Range::kMostScaled);
    };
    if (__any_sync(tile::kFullMask, lost(0) || lost(1))) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float old = row_max_words[h];
      const int raised = tile::raise_by(row_sums[h], Range::kSumExponent);
      row_max_words[h] = old - static_cast<float>(raised);
      if constexpr (Range::kToPower) {
        const float exponent = ptx::log2(row_max(probabilities, h));
        if (raised > 0) row_max_words[h] -= exponent - floorf(exponent);
      }
      factors[h] = ptx::exp2(row_max_words[h] - old);
      row_sum[h] *= factors[h];
      // seed: scale-sum
      sums[h] *= factors[h];
    }
    // seed: scale-probabilities
    rescale(probabilities, factors);
    return true;
  }

  __device__ __forceinline__ void add(const float (&sums)[2]) {
    row_sum[0] += sums[0];
    row_sum[1] += sums[1];
  }

  // Takes another softmax of the same rows over other keys into this one. `factors` and
  // `other_factors` as in raise(): of what each of the two has accumulated. All lanes call it.
  __device__ __forceinline__ void merge(const RangedSoftmax& other, float scale,
                                        float (&factors)[2], float (&other_factors)[2]) {
    const bool either_unscaled = unscaled() || other.unscaled();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const tile::RowMax own(row_max_words[h], unscaled()),
          others(other.row_max_words[h], other.unscaled());
      float word = fminf(row_max_words[h], other.row_max_words[h]);
      if (either_unscaled) {
        const tile::RaisedRowMax theirs(others, -INFINITY, scale);
        word = tile::RaisedRowMax(own, theirs.base, scale).word(scale, true);
      }
      const tile::RowMax both(word, either_unscaled);
      factors[h] = tile::change_of_row_max(own, both, scale);
      other_factors[h] = tile::change_of_row_max(others, both, scale);
      row_max_words[h] = word;
      // seed: merge-sums
      row_sum[h] = row_sum[h] * factors[h] + other.row_sum[h] * other_factors[h];
    }
    if (either_unscaled) set_mode(kUnscaled);
  }

  // A row's result, of all its scores. All lanes call it.
  __device__ __forceinline__ tile::RowResult finalize(int h, float scale, const float* sink,
                                                      float shift = 0.0f) const {
    return tile::finalize(tile::RowMax(row_max_words[h], unscaled()), scale,
                          tile::reduce_sum<4>(row_sum[h]), sink, shift);
  }

 private:
  __device__ __forceinline__ static bool is_beyond_scaled(float word) {
    return tile::is_beyond_scaled(word, Range::kMostScaled);
  }

  // The word of a scaled row max, relative to which `maximum` is Range::kFirstExponent.
  __device__ __forceinline__ static float word_of(float maximum, float scale) {
    if constexpr (Range::kFirstExponent == 0) return -maximum * scale;
    return fmaf(-maximum, scale, static_cast<float>(Range::kFirstExponent));
  }

  template <int kScores>
  __device__ __forceinline__ static float row_max(const float (&acc_s)[kScores], int h) {
    float even = acc_s[2 * h], odd = acc_s[2 * h + 1];
#pragma unroll
    for (int j = 1; j < kScores / 4; ++j) {
      even = fmaxf(even, acc_s[4 * j + 2 * h]);
      odd = fmaxf(odd, acc_s[4 * j + 2 * h + 1]);
    }
    return tile::reduce_max<4>(fmaxf(even, odd));
  }

  template <int kScores>
  __device__ __forceinline__ void raise_any(float (&acc_s)[kScores], const float (&maxima)[2],
                                            float scale, bool may_hide_tiny_scores,
                                            float (&factors)[2]) {
    const tile::RaisedRowMax raised[2] = {
        {tile::RowMax(row_max_words[0], unscaled()), maxima[0], scale},
        {tile::RowMax(row_max_words[1], unscaled()), maxima[1], scale}};
    constexpr float kMost = Range::kMostScaled;
    const bool unscaled = __any_sync(
        tile::kFullMask, raised[0].needs_unscaled(scale, may_hide_tiny_scores, kMost) ||
                             raised[1].needs_unscaled(scale, may_hide_tiny_scores, kMost));
    set_mode(unscaled ? kUnscaled : kScaled);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_max_words[h] = raised[h].word(scale, unscaled);
      factors[h] =
          tile::change_of_row_max(raised[h].from, tile::RowMax(row_max_words[h], unscaled), scale);
      row_sum[h] *= factors[h];
    }
    if (!unscaled) return;
    // All scores of a row that has seen nothing are -inf.
#pragma unroll
    for (int i = 0; i < kScores; ++i) acc_s[i] -= fmaxf(row_max_words[i / 2 % 2], -tile::kNothing);
  }
};

}  // namespace dlattn::tile::wgmma
