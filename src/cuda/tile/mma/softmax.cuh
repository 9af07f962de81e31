#pragma once

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/row_max.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::tile::mma {

// Accumulators of kRowTiles x kColumns / 8 products of m16n8k16. A lane has two rows of row tile m,
// h = 0 and 1: elements 2 h and 2 h + 1 of each product belong to row 16 m + 8 h + lane / 4.
template <int kRowTiles, int kColumns>
using Accumulators = float[kRowTiles][kColumns / 8][4];

// The streaming softmax of a warp's rows, with a speculative row max: probabilities are computed
// relative to a row max that may be stale, and the tile's maximum is not computed.
//
// The sum of the probabilities, which is needed anyway, tells whether the row max still fits, and
// by how much it does not. The speculative max overflows where a lane's sum over a slice of keys
// exceeds kMaxSum. Then the row max of each row whose sum is 2 or more is raised by a power of two,
// so that the sum becomes 1 or a little more. The accumulators and the probabilities, which are
// still in fp32, are scaled to it. Where the sum overflowed fp32 as well, the caller recomputes the
// scores and raises the row maxima to the scores' maxima first. A warp with an unscaled row max
// (tile/row_max.cuh) does that for every tile.
//
// So no probability exceeds kMaxSum, for which T and fp32 sums have room. The row max cancels in
// out and lse, and the result is the plain softmax's. Scores here are raw products q.k, or natural
// ones; `scale` makes them base 2.
template <int kRowTiles>
struct SpeculativeSoftmax {
  float row_max_words[kRowTiles][2];  // the row maxima, each the word of a tile::RowMax
  float row_sum[kRowTiles][2];        // this lane's part
  bool unscaled = false;  // whether the warp's words are row maxima in the scores' units

  __device__ __forceinline__ SpeculativeSoftmax() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_max_words[m][h] = tile::kNothing;
        row_sum[m][h] = 0.0f;
      }
    }
  }

  // Turns the scores of keys kFirst .. kFirst + kKeys - 1 of the tile into probabilities, in place,
  // and adds them to the sums. All row maxima must be scaled. Returns false where the speculative
  // max of one of the warp's rows overflowed by more than fp32 holds, or at all if `is_flushed`
  // (tile/accumulator_flush.cuh). Then neither sums nor row maxima have changed, but these keys'
  // scores are lost: they must be recomputed, and the row maxima raised to theirs. All lanes call
  // it.
  template <int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ bool speculate(float (&acc_s)[kRowTiles][kGroups][4], float scale,
                                            float (&acc_o)[kRowTiles][kOutGroups][4],
                                            bool is_flushed = false) {
    float sums[kRowTiles][2];
    exponentiate<kFirst, kKeys>(acc_s, scale, sums);
    // seed: scale-down
    if (overflows(sums) && (is_flushed || !scale_down<kFirst, kKeys>(acc_s, sums, acc_o)))
      return false;
    add(sums);
    return true;
  }

  // The same for keys whose scores are likely to exceed the row max: raises the row maxima, of
  // either kind, first. Packs the probabilities as operands of products with V.
  // `may_hide_tiny_scores`: scores may be so small that a scaled row max does not tell them from
  // -inf.
  template <typename T, int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ void first_probabilities(float (&acc_s)[kRowTiles][kGroups][4],
                                                      float scale, bool may_hide_tiny_scores,
                                                      std::uint32_t (&rP)[kRowTiles][kKeys / 16][4],
                                                      float (&acc_o)[kRowTiles][kOutGroups][4]) {
    raise_maxima<kFirst, kKeys>(acc_s, scale, may_hide_tiny_scores, acc_o);
    safe_probabilities<T, kFirst, kKeys>(acc_s, scale, rP);
  }

  // The same after raise_maxima(), for all keys of the tile. Leaves the probabilities in fp32.
  template <int kGroups>
  __device__ __forceinline__ void raised_probabilities(float (&acc_s)[kRowTiles][kGroups][4],
                                                       float scale) {
    float sums[kRowTiles][2];
    exponentiate_raised<0, kGroups * 8>(acc_s, scale, sums);
    add(sums);
  }

  // Raises a scaled row max that a score exceeds by more than kSlack to the maximum of the row's
  // scores. Where one of the warp's is or becomes unscaled, raises all, and leaves the scores
  // relative to them. `may_hide_tiny_scores` as above. All lanes call it.
  template <int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ void raise_maxima(float (&acc_s)[kRowTiles][kGroups][4], float scale,
                                               bool may_hide_tiny_scores,
                                               float (&acc_o)[kRowTiles][kOutGroups][4]) {
    const Excess excess = excess_of<kFirst, kKeys>(acc_s, scale, may_hide_tiny_scores);
    const bool any_beyond = __any_sync(tile::kFullMask, excess.beyond_scaled);
    if (!__any_sync(tile::kFullMask, excess.needs_raise)) return;
    const RowValues maxima = row_maxima<kFirst, kKeys>(acc_s);
    if (__builtin_expect(any_beyond, 0))
      return raise_any<kFirst, kKeys>(acc_s, maxima, scale, may_hide_tiny_scores, acc_o);
    // A NaN score is no maximum, but its probability is NaN, so that it reaches sum and output.
    const auto raised = [&](int m, int h) {
      return exceeds(m, h, maxima.of[m][h], scale) ? -maxima.of[m][h] * scale : row_max_words[m][h];
    };
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float old = row_max_words[m][h];
        row_max_words[m][h] = raised(m, h);
        scale_row(m, h, ptx::exp2(row_max_words[m][h] - old), acc_o);
      }
    }
  }

  // Whether raise_maxima() would raise a row max for these scores or some of them. All lanes call
  // it.
  template <int kGroups>
  __device__ __forceinline__ bool would_raise(const float (&acc_s)[kRowTiles][kGroups][4],
                                              float scale, bool may_hide_tiny_scores) const {
    return __any_sync(tile::kFullMask,
                      excess_of<0, kGroups * 8>(acc_s, scale, may_hide_tiny_scores).needs_raise);
  }

  // raise_maxima() before anything has been accumulated. All lanes call it.
  template <int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ void set_maxima(float (&acc_s)[kRowTiles][kGroups][4], float scale) {
    float nothing[kRowTiles][1][4] = {};
    raise_maxima<kFirst, kKeys>(acc_s, scale, false, nothing);
  }

  // Warps that share rows merge their parts by scaled row maxima: returns the row's, rounded, and
  // the sum of its four lanes relative to it. All lanes call it.
  __device__ __forceinline__ tile::OnlineSoftmax scaled_row(int m, int h, float scale) const {
    const float row_max = unscaled ? row_max_words[m][h] * scale : -row_max_words[m][h];
    const float sum = tile::reduce_sum<4>(row_sum[m][h]) * scaled_part(m, h, scale);
    return {row_max == -tile::kNothing ? -INFINITY : row_max, sum};
  }

  // Makes the accumulators relative to the row maxima of scaled_row().
  template <int kOutGroups>
  __device__ __forceinline__ void scale_rows(float scale,
                                             float (&acc_o)[kRowTiles][kOutGroups][4]) {
    if (!unscaled) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) scale_row(m, h, scaled_part(m, h, scale), acc_o);
    }
  }

  // Probabilities of scores for which no row max must be raised. The row maxima may be of either
  // kind. kBranches takes fewer registers.
  template <typename T, int kFirst, int kKeys, bool kBranches = (kRowTiles > 1), int kGroups>
  __device__ __forceinline__ void safe_probabilities(
      float (&acc_s)[kRowTiles][kGroups][4], float scale,
      std::uint32_t (&rP)[kRowTiles][kKeys / 16][4]) {
    float sums[kRowTiles][2];
    if constexpr (kBranches) {
      if (!unscaled) {
        // Packed on both branches: where they meet, packed values take half the registers.
        exponentiate<kFirst, kKeys>(acc_s, scale, sums);
        add(sums);
        return pack<T, kFirst, kKeys>(acc_s, rP);
      }
    }
    exponentiate_raised<kFirst, kKeys>(acc_s, scale, sums);
    add(sums);
    pack<T, kFirst, kKeys>(acc_s, rP);
  }

  // Packs the accumulators of two neighbouring groups of 8 keys into the lane's part of a 16 x 16
  // operand. No data moves between lanes.
  template <typename T, int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ static void pack(const float (&probabilities)[kRowTiles][kGroups][4],
                                              std::uint32_t (&rP)[kRowTiles][kKeys / 16][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        const float (&p)[4] = probabilities[m][kFirst / 8 + j];
#pragma unroll
        for (int h = 0; h < 2; ++h)
          rP[m][j / 2][j % 2 * 2 + h] = tile::pack<T>(p[2 * h], p[2 * h + 1]);
      }
    }
  }

  // A row's result after its last tile. All lanes call it.
  __device__ __forceinline__ tile::RowResult finalize(int m, int h, float scale,
                                                      const float* sink) const {
    return tile::finalize(tile::RowMax(row_max_words[m][h], unscaled), scale,
                          tile::reduce_sum<4>(row_sum[m][h]), sink);
  }

 private:
  static constexpr float kSlack = 8.0f;

  // Whether a score exceeds the row's scaled max by so much that it is raised.
  __device__ __forceinline__ bool exceeds(int m, int h, float score, float scale) const {
    return score * scale > kSlack - row_max_words[m][h];
  }

  // Conditions that hold for at least one of this lane's scores.
  struct Excess {
    bool needs_raise;    // a score exceeds its row max by more than kSlack
    bool beyond_scaled;  // a score is too large for a scaled row max
  };
  template <int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ Excess excess_of(const float (&acc_s)[kRowTiles][kGroups][4],
                                              float scale, bool may_hide_tiny_scores) const {
    Excess excess{unscaled, unscaled};
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float lane = lane_max<kFirst, kKeys>(acc_s[m], h);
        const bool nothing = may_hide_tiny_scores && row_max_words[m][h] == tile::kNothing;
        excess.needs_raise |= exceeds(m, h, lane, scale) || nothing;
        excess.beyond_scaled |=
            (!(fabsf(lane * scale) < tile::kMostScaled) && lane != -INFINITY) || nothing;
      }
    }
    return excess;
  }

  __device__ __forceinline__ void add(const float (&sums)[kRowTiles][2]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) row_sum[m][h] += sums[m][h];
    }
  }

  template <int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ static float lane_max(const float (&acc)[kGroups][4], int h) {
    float x = acc[kFirst / 8][2 * h];
#pragma unroll
    for (int j = kFirst / 8; j < (kFirst + kKeys) / 8; ++j)
      x = fmaxf(x, fmaxf(acc[j][2 * h], acc[j][2 * h + 1]));
    return x;
  }

  // Turns scores into probabilities, in place, and sums them.
  template <int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ static void exponentiate(float (&acc_s)[kRowTiles][kGroups][4],
                                                      float scale,
                                                      const float (&negs)[kRowTiles][2],
                                                      float (&sums)[kRowTiles][2]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      sums[m][0] = sums[m][1] = 0.0f;
#pragma unroll
      for (int j = kFirst / 8; j < (kFirst + kKeys) / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          acc_s[m][j][e] = ptx::exp2(fmaf(acc_s[m][j][e], scale, negs[m][e / 2]));
          sums[m][e / 2] += acc_s[m][j][e];
        }
      }
    }
  }

  // The same relative to scaled row maxima.
  template <int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ void exponentiate(float (&acc_s)[kRowTiles][kGroups][4], float scale,
                                               float (&sums)[kRowTiles][2]) const {
    exponentiate<kFirst, kKeys>(acc_s, scale, row_max_words, sums);
  }

  // The same after raise_maxima(), for row maxima of either kind. Without a branch it may overlap
  // with products, but takes registers.
  template <int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ void exponentiate_raised(float (&acc_s)[kRowTiles][kGroups][4],
                                                      float scale,
                                                      float (&sums)[kRowTiles][2]) const {
    float negs[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) negs[m][h] = unscaled ? 0.0f : row_max_words[m][h];
    }
    exponentiate<kFirst, kKeys>(acc_s, scale, negs, sums);
  }

  // Whether the speculative max of one of the warp's rows overflows.
  __device__ __forceinline__ bool overflows(const float (&sums)[kRowTiles][2]) const {
    bool above = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
      above |= sums[m][0] > tile::kMaxSum || sums[m][1] > tile::kMaxSum;
    return __any_sync(tile::kFullMask, above);
  }

  // Raises the row max of each row whose sum is 2 or more, so that the sum becomes 1 or a little
  // more, and scales the row's probabilities, sum and accumulators to it. Where that is impossible
  // for one of the warp's rows, does nothing and returns false. All lanes call it.
  template <int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ bool scale_down(float (&probabilities)[kRowTiles][kGroups][4],
                                             float (&sums)[kRowTiles][2],
                                             float (&acc_o)[kRowTiles][kOutGroups][4]) {
    bool lost = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        lost |= sums[m][h] > tile::kLargest || !tile::can_raise(row_max_words[m][h]);
    }
    if (__any_sync(tile::kFullMask, lost)) return false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int shift = tile::raise_by(tile::reduce_sum<4>(sums[m][h]));
        const float old = row_max_words[m][h];
        row_max_words[m][h] = old - static_cast<float>(shift);
        const float factor = ptx::exp2(row_max_words[m][h] - old);
        scale_row(m, h, factor, acc_o);
        sums[m][h] *= factor;
#pragma unroll
        for (int j = kFirst / 8; j < (kFirst + kKeys) / 8; ++j) {
          probabilities[m][j][2 * h] *= factor;
          probabilities[m][j][2 * h + 1] *= factor;
        }
      }
    }
    return true;
  }

  // Times this, what is relative to a row max is relative to the row max scaled and rounded. From
  // 2^26 on, where that is a factor beyond 2^4, the rounding is not taken back: it is the same in
  // all warps that share the row.
  __device__ __forceinline__ float scaled_part(int m, int h, float scale) const {
    const float row_max = row_max_words[m][h] * scale;
    constexpr float kMostRounded = 0x1p26f;
    if (!unscaled || !(fabsf(row_max) < kMostRounded)) return 1.0f;
    return ptx::exp2(fmaf(row_max_words[m][h], scale, -row_max));
  }

  // One number for each row.
  struct RowValues {
    float of[kRowTiles][2];
  };
  template <int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ static RowValues row_maxima(
      const float (&acc_s)[kRowTiles][kGroups][4]) {
    RowValues maxima;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        maxima.of[m][h] = tile::reduce_max<4>(lane_max<kFirst, kKeys>(acc_s[m], h));
    }
    return maxima;
  }

  // raise_maxima() for scores of any size and row maxima of either kind.
  template <int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ void raise_any(float (&acc_s)[kRowTiles][kGroups][4],
                                            const RowValues& maxima, float scale,
                                            bool may_hide_tiny_scores,
                                            float (&acc_o)[kRowTiles][kOutGroups][4]) {
    const bool were_unscaled = unscaled;
    const auto raised = [&](int m, int h) {
      return tile::RaisedRowMax(tile::RowMax(row_max_words[m][h], were_unscaled), maxima.of[m][h],
                                scale, were_unscaled ? 0.0f : kSlack);
    };
    bool needs_unscaled = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        needs_unscaled |= raised(m, h).needs_unscaled(scale, may_hide_tiny_scores);
    }
    unscaled = __any_sync(tile::kFullMask, needs_unscaled);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        take_max(m, h, raised(m, h).word(scale, unscaled), were_unscaled, scale, acc_o);
    }
    if (!unscaled) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = kFirst / 8; j < (kFirst + kKeys) / 8; ++j) {
        // A row that has seen nothing has base -inf and scores of -inf: -inf - -inf is NaN.
#pragma unroll
        for (int e = 0; e < 4; ++e)
          acc_s[m][j][e] -= fmaxf(row_max_words[m][e / 2], -tile::kNothing);
      }
    }
  }

  // Gives a row its new max and scales what it has accumulated.
  template <int kOutGroups>
  __device__ __forceinline__ void take_max(int m, int h, float word, bool was_unscaled, float scale,
                                           float (&acc_o)[kRowTiles][kOutGroups][4]) {
    const tile::RowMax from(row_max_words[m][h], was_unscaled);
    row_max_words[m][h] = word;
    scale_row(m, h, tile::change_of_row_max(from, tile::RowMax(word, unscaled), scale), acc_o);
  }

  template <int kOutGroups>
  __device__ __forceinline__ void scale_row(int m, int h, float factor,
                                            float (&acc_o)[kRowTiles][kOutGroups][4]) {
    row_sum[m][h] *= factor;
#pragma unroll
    for (int j = 0; j < kOutGroups; ++j) {
      acc_o[m][j][2 * h] *= factor;
      acc_o[m][j][2 * h + 1] *= factor;
    }
  }
};

}  // namespace dlattn::tile::mma
