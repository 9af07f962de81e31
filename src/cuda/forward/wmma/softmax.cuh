#pragma once

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/reference.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::wmma {

// Accumulators of kRowTiles x kColumns / 8 products of m16n8k16. Of row tile m a lane has two rows,
// h = 0 and 1: row 16 m + 8 h + lane / 4, in elements 2 h and 2 h + 1 of each.
template <int kRowTiles, int kColumns>
using Accumulators = float[kRowTiles][kColumns / 8][4];

// The streaming softmax of a warp's rows, with a reference in place of the running maximum.
//
// Probabilities are taken relative to the row's reference as it stands, with no maximum worked out
// first. Their sum, which is needed anyway, tells whether the reference still fits, and by how much
// it does not. Where a lane's sum over a slice of keys exceeds kMaxSum, the references of the rows
// that have outgrown theirs are raised by a power of two, so that their sums come to 1 or a little
// more, and what has been accumulated is scaled to them, the probabilities too, which are in fp32
// until then. Where fp32 was too small for a sum, the caller makes the scores again and has
// references raised to their maxima; as long as one of the warp's is unscaled
// (tile/reference.cuh), all are raised so beforehand. So no probability exceeds kMaxSum, which T
// and fp32 sums do not mind; the reference cancels in out and lse, and the result is the plain
// softmax's. Scores here are raw products q.k, or natural ones; `scale` makes them base 2.
template <int kRowTiles>
struct SpeculativeSoftmax {
  float words[kRowTiles][2];    // the references: tile::Reference
  float row_sum[kRowTiles][2];  // this lane's part
  // Of the warp: whether words are references in the scores' units.
  bool unscaled = false;

  __device__ __forceinline__ SpeculativeSoftmax() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) words[m][h] = tile::kNothing, row_sum[m][h] = 0.0f;
    }
  }

  // The probabilities of keys kFirst .. kFirst + kKeys - 1 of the tile, in place, added to the
  // sums, relative to references that are all scaled. False where one of the warp's rows has
  // outgrown its by more than fp32 holds, or at all if `is_aside` (tile/aside.cuh): nothing has
  // happened then, but these keys' scores are lost, and must be made again for references to be
  // raised to their maxima. All lanes call it.
  template <int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ bool speculate(float (&acc_s)[kRowTiles][kGroups][4], float scale,
                                            float (&acc_o)[kRowTiles][kOutGroups][4],
                                            bool is_aside = false) {
    float sums[kRowTiles][2];
    exponentiate<kFirst, kKeys>(acc_s, scale, sums);
    if (outgrown(sums) && (is_aside || !scale_down<kFirst, kKeys>(acc_s, sums, acc_o)))
      return false;
    add(sums);
    return true;
  }

  // The same, and as the operands of products with V, where rows are likely to outgrow their
  // references: those are raised beforehand, whatever they are.
  // `faint`: scores may be so small that a scaled reference does not tell them from -inf.
  template <typename T, int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ void first_probabilities(float (&acc_s)[kRowTiles][kGroups][4],
                                                      float scale, bool faint,
                                                      std::uint32_t (&rP)[kRowTiles][kKeys / 16][4],
                                                      float (&acc_o)[kRowTiles][kOutGroups][4]) {
    raise_references<kFirst, kKeys>(acc_s, scale, faint, acc_o);
    safe_probabilities<T, kFirst, kKeys>(acc_s, scale, rP);
  }

  // The same after raise_references(), of all keys of the tile, and in fp32.
  template <int kGroups>
  __device__ __forceinline__ void raised_probabilities(float (&acc_s)[kRowTiles][kGroups][4],
                                                       float scale) {
    float sums[kRowTiles][2];
    exponentiate_raised<0, kGroups * 8>(acc_s, scale, sums);
    add(sums);
  }

  // Raises references to the maxima where a score exceeds a scaled one by more than kSlack. Where
  // one of them is or becomes unscaled, raises all, and leaves the scores relative to them. `faint`
  // as above. All lanes call it.
  template <int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ void raise_references(float (&acc_s)[kRowTiles][kGroups][4],
                                                   float scale, bool faint,
                                                   float (&acc_o)[kRowTiles][kOutGroups][4]) {
    const Excess excess = excess_of<kFirst, kKeys>(acc_s, scale, faint);
    const bool any_beyond = __any_sync(tile::kFullMask, excess.beyond);
    if (!__any_sync(tile::kFullMask, excess.outgrown)) return;
    const RowValues maxima = row_maxima<kFirst, kKeys>(acc_s);
    if (__builtin_expect(any_beyond, 0))
      return raise_any<kFirst, kKeys>(acc_s, maxima, scale, faint, acc_o);
    // A NaN score is no maximum, but its probability is NaN, so that it reaches sum and output.
    const auto raised = [&](int m, int h) {
      return exceeds(m, h, maxima.of[m][h], scale) ? -maxima.of[m][h] * scale : words[m][h];
    };
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float old = words[m][h];
        words[m][h] = raised(m, h);
        scale_row(m, h, ptx::exp2(words[m][h] - old), acc_o);
      }
    }
  }

  // Whether it would raise any, for these scores or some of them. All lanes call it.
  template <int kGroups>
  __device__ __forceinline__ bool would_raise(const float (&acc_s)[kRowTiles][kGroups][4],
                                              float scale, bool faint) const {
    return __any_sync(tile::kFullMask, excess_of<0, kGroups * 8>(acc_s, scale, faint).outgrown);
  }

  // raise_references() before anything has been accumulated. All lanes call it.
  template <int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ void set_references(float (&acc_s)[kRowTiles][kGroups][4],
                                                 float scale) {
    float nothing[kRowTiles][1][4] = {};
    raise_references<kFirst, kKeys>(acc_s, scale, false, nothing);
  }

  // Where warps share rows, their parts are merged by scaled references: a row's, rounded, and the
  // whole sum relative to it. All lanes call it.
  __device__ __forceinline__ tile::OnlineSoftmax scaled_row(int m, int h, float scale) const {
    const float row_max = unscaled ? words[m][h] * scale : -words[m][h];
    const float sum = tile::reduce_sum<4>(row_sum[m][h]) * scaled_part(m, h, scale);
    return {row_max == -tile::kNothing ? -INFINITY : row_max, sum};
  }

  // And what has been accumulated.
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

  // Probabilities that no reference needs raising for, whatever references are. With kBranches in
  // fewer registers.
  template <typename T, int kFirst, int kKeys, bool kBranches = (kRowTiles > 1), int kGroups>
  __device__ __forceinline__ void safe_probabilities(
      float (&acc_s)[kRowTiles][kGroups][4], float scale,
      std::uint32_t (&rP)[kRowTiles][kKeys / 16][4]) {
    float sums[kRowTiles][2];
    if (kBranches && !unscaled) {
      // Packed on either way: where these meet, that takes half the registers.
      exponentiate<kFirst, kKeys>(acc_s, scale, sums);
      add(sums);
      return pack<T, kFirst, kKeys>(acc_s, rP);
    }
    exponentiate_raised<kFirst, kKeys>(acc_s, scale, sums);
    add(sums);
    pack<T, kFirst, kKeys>(acc_s, rP);
  }

  // The accumulators of two neighbouring groups of 8 keys are, packed, the 16 x 16 operand of the
  // lane: no data moves between lanes.
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

  // A row's result, of all its scores. All lanes call it.
  __device__ __forceinline__ tile::RowResult finalize(int m, int h, float scale,
                                                      const float* sink) const {
    return tile::finalize(tile::Reference(words[m][h], unscaled), scale,
                          tile::reduce_sum<4>(row_sum[m][h]), sink);
  }

 private:
  static constexpr float kSlack = 8.0f;

  // Whether a score is so far above the row's reference, a scaled one, that this is worth raising.
  __device__ __forceinline__ bool exceeds(int m, int h, float score, float scale) const {
    return score * scale > kSlack - words[m][h];
  }

  // Of this lane's scores: whether references must be raised for one, or one is beyond scaled
  // references.
  struct Excess {
    bool outgrown, beyond;
  };
  template <int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ Excess excess_of(const float (&acc_s)[kRowTiles][kGroups][4],
                                              float scale, bool faint) const {
    Excess excess{unscaled, unscaled};
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float lane = lane_max<kFirst, kKeys>(acc_s[m], h);
        const bool nothing = faint && words[m][h] == tile::kNothing;
        excess.outgrown |= exceeds(m, h, lane, scale) || nothing;
        excess.beyond |=
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

  // Scores to probabilities, in place, and their sums.
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

  // The same relative to scaled references.
  template <int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ void exponentiate(float (&acc_s)[kRowTiles][kGroups][4], float scale,
                                               float (&sums)[kRowTiles][2]) const {
    exponentiate<kFirst, kKeys>(acc_s, scale, words, sums);
  }

  // The same after raise_references(), whatever references are. Without a branch it may overlap
  // with products, but takes registers.
  template <int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ void exponentiate_raised(float (&acc_s)[kRowTiles][kGroups][4],
                                                      float scale,
                                                      float (&sums)[kRowTiles][2]) const {
    float negs[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) negs[m][h] = unscaled ? 0.0f : words[m][h];
    }
    exponentiate<kFirst, kKeys>(acc_s, scale, negs, sums);
  }

  // Whether one of the warp's rows has outgrown its reference.
  __device__ __forceinline__ bool outgrown(const float (&sums)[kRowTiles][2]) const {
    bool above = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
      above |= sums[m][0] > tile::kMaxSum || sums[m][1] > tile::kMaxSum;
    return __any_sync(tile::kFullMask, above);
  }

  // Raises the references of the rows whose sums are 2 or more, so far that these come to 1 or a
  // little more, and scales probabilities and sums to them. Does nothing and returns false where
  // that cannot be done to one of the warp's. All lanes call it.
  template <int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ bool scale_down(float (&probabilities)[kRowTiles][kGroups][4],
                                             float (&sums)[kRowTiles][2],
                                             float (&acc_o)[kRowTiles][kOutGroups][4]) {
    bool lost = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        lost |= sums[m][h] > tile::kLargest || !tile::can_raise(words[m][h]);
    }
    if (__any_sync(tile::kFullMask, lost)) return false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int shift = tile::raise_by(tile::reduce_sum<4>(sums[m][h]));
        const float old = words[m][h];
        words[m][h] = old - static_cast<float>(shift);
        const float factor = ptx::exp2(words[m][h] - old);
        scale_row(m, h, factor, acc_o);
        sums[m][h] *= factor;
#pragma unroll
        for (int j = kFirst / 8; j < (kFirst + kKeys) / 8; ++j)
          probabilities[m][j][2 * h] *= factor, probabilities[m][j][2 * h + 1] *= factor;
      }
    }
    return true;
  }

  // What is relative to a row's reference, times this, is relative to that scaled and rounded. Of
  // one whose rounding is whole powers of two that is taken as it is: so it is in all parts alike.
  __device__ __forceinline__ float scaled_part(int m, int h, float scale) const {
    const float row_max = words[m][h] * scale;
    if (!unscaled || !(fabsf(row_max) < tile::kMostScaled)) return 1.0f;
    return ptx::exp2(fmaf(words[m][h], scale, -row_max));
  }

  // A number of each row.
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

  // raise_references() for scores of any size and references of either kind.
  template <int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ void raise_any(float (&acc_s)[kRowTiles][kGroups][4],
                                            const RowValues& maxima, float scale, bool faint,
                                            float (&acc_o)[kRowTiles][kOutGroups][4]) {
    const bool were_unscaled = unscaled;
    const auto raised = [&](int m, int h) {
      return tile::RaisedReference(tile::Reference(words[m][h], were_unscaled), maxima.of[m][h],
                                   scale, were_unscaled ? 0.0f : kSlack);
    };
    bool needs_unscaled = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) needs_unscaled |= raised(m, h).needs_unscaled(scale, faint);
    }
    unscaled = __any_sync(tile::kFullMask, needs_unscaled);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        take_reference(m, h, raised(m, h).word(scale, unscaled), were_unscaled, scale, acc_o);
    }
    if (!unscaled) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = kFirst / 8; j < (kFirst + kKeys) / 8; ++j) {
        // Of a row that has seen nothing all scores are -inf.
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_s[m][j][e] -= fmaxf(words[m][e / 2], -tile::kNothing);
      }
    }
  }

  // Gives a row its new reference and scales what it has accumulated.
  template <int kOutGroups>
  __device__ __forceinline__ void take_reference(int m, int h, float word, bool was_unscaled,
                                                 float scale,
                                                 float (&acc_o)[kRowTiles][kOutGroups][4]) {
    const tile::Reference from(words[m][h], was_unscaled);
    words[m][h] = word;
    scale_row(m, h, tile::change_of_reference(from, tile::Reference(word, unscaled), scale), acc_o);
  }

  template <int kOutGroups>
  __device__ __forceinline__ void scale_row(int m, int h, float factor,
                                            float (&acc_o)[kRowTiles][kOutGroups][4]) {
    row_sum[m][h] *= factor;
#pragma unroll
    for (int j = 0; j < kOutGroups; ++j)
      acc_o[m][j][2 * h] *= factor, acc_o[m][j][2 * h + 1] *= factor;
  }
};

}  // namespace dlattn::wmma
