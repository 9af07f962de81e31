#pragma once

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
// Probabilities are taken relative to the row's reference as it stands: 2^(score - reference), with
// no maximum worked out first. Their sum, which is needed anyway, tells whether the reference still
// fits, and by how much it does not. Where a lane's sum over a slice of keys exceeds kMaxSum, the
// references of the rows that have outgrown theirs are raised by a power of two, so that their sums
// come to 1 or a little more, and what has been accumulated is scaled to them, the probabilities
// too, which are in fp32 until then. Where fp32 was too small for a sum, the caller makes the
// scores again and has references raised to their maxima. So no probability exceeds kMaxSum,
// which T and fp32 sums do not mind; the reference cancels in out and lse, and the result is the
// plain softmax's. Scores here are raw products q.k; `scale` is softmax_scale * log2(e).
template <int kRowTiles>
struct SpeculativeSoftmax {
  float neg_reference[kRowTiles][2];
  float row_sum[kRowTiles][2];  // this lane's part

  __device__ __forceinline__ SpeculativeSoftmax() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) neg_reference[m][h] = tile::kNothing, row_sum[m][h] = 0.0f;
    }
  }

  // The probabilities of keys kFirst .. kFirst + kKeys - 1 of the tile, in place and as the
  // operands of products with V, added to the sums. Where one of the warp's rows has outgrown its
  // reference by more than fp32 holds, these keys' scores are lost: make_scores() must put them
  // back, for references to be raised to their maxima. All lanes call it.
  template <typename T, int kFirst, int kKeys, int kGroups, int kOutGroups, typename MakeScores>
  __device__ __forceinline__ void probabilities(float (&acc_s)[kRowTiles][kGroups][4], float scale,
                                                std::uint32_t (&rP)[kRowTiles][kKeys / 16][4],
                                                float (&acc_o)[kRowTiles][kOutGroups][4],
                                                const MakeScores& make_scores) {
    float sums[kRowTiles][2];
    exponentiate<kFirst, kKeys>(acc_s, scale, sums);
    if (any_above(sums, tile::kMaxSum<T>)) {
      if (any_above(sums, tile::kLargest)) {
        make_scores();
        raise_references<kFirst, kKeys>(acc_s, scale, acc_o);
        exponentiate<kFirst, kKeys>(acc_s, scale, sums);
      } else {
        scale_down<kFirst, kKeys>(acc_s, sums, acc_o);
      }
    }
    add(sums);
    pack<T, kFirst, kKeys>(acc_s, rP);
  }

  // The same where rows are likely to outgrow their references: those are raised beforehand.
  template <typename T, int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ void first_probabilities(float (&acc_s)[kRowTiles][kGroups][4],
                                                      float scale,
                                                      std::uint32_t (&rP)[kRowTiles][kKeys / 16][4],
                                                      float (&acc_o)[kRowTiles][kOutGroups][4]) {
    raise_references<kFirst, kKeys>(acc_s, scale, acc_o);
    safe_probabilities<T, kFirst, kKeys>(acc_s, scale, rP);
  }

  // As probabilities(), but false where scores are lost, and nothing else has happened then: for
  // callers that make them again and raise references first. Of all keys of the tile, in fp32.
  template <typename T, int kGroups, int kOutGroups>
  __device__ __forceinline__ bool try_probabilities(float (&acc_s)[kRowTiles][kGroups][4],
                                                    float scale, bool raised,
                                                    float (&acc_o)[kRowTiles][kOutGroups][4]) {
    float sums[kRowTiles][2];
    exponentiate<0, kGroups * 8>(acc_s, scale, sums);
    if (any_above(sums, tile::kMaxSum<T>)) {
      if (!raised && any_above(sums, tile::kLargest)) return false;
      scale_down<0, kGroups * 8>(acc_s, sums, acc_o);
    }
    add(sums);
    return true;
  }

  // Raises references to the maxima where a score exceeds them by more than kSlack. All lanes call
  // it.
  template <int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ void raise_references(const float (&acc_s)[kRowTiles][kGroups][4],
                                                   float scale,
                                                   float (&acc_o)[kRowTiles][kOutGroups][4]) {
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        outgrown |= exceeds(m, h, lane_max<kFirst, kKeys>(acc_s[m], h), scale);
    }
    if (!__any_sync(tile::kFullMask, outgrown)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float row_max = tile::reduce_max<4>(lane_max<kFirst, kKeys>(acc_s[m], h));
        // A NaN score is no maximum, but its probability is NaN, so that it reaches sum and output.
        raise(m, h, exceeds(m, h, row_max, scale) ? -row_max * scale : neg_reference[m][h], acc_o);
      }
    }
  }

  // The same before anything has been accumulated. All lanes call it.
  template <int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ void set_references(const float (&acc_s)[kRowTiles][kGroups][4],
                                                 float scale) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float row_max = tile::reduce_max<4>(lane_max<kFirst, kKeys>(acc_s[m], h));
        neg_reference[m][h] = row_max == -INFINITY ? tile::kNothing : -row_max * scale;
      }
    }
  }

  // Probabilities that no reference needs raising for.
  template <typename T, int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ void safe_probabilities(
      float (&acc_s)[kRowTiles][kGroups][4], float scale,
      std::uint32_t (&rP)[kRowTiles][kKeys / 16][4]) {
    float sums[kRowTiles][2];
    exponentiate<kFirst, kKeys>(acc_s, scale, sums);
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

  // A row's state, with the whole row's sum. All lanes call it.
  __device__ __forceinline__ tile::OnlineSoftmax row(int m, int h) const {
    return tile::row_state(neg_reference[m][h], tile::reduce_sum<4>(row_sum[m][h]));
  }

 private:
  // Whether a score is so far above the row's reference that this is worth raising.
  __device__ __forceinline__ bool exceeds(int m, int h, float score, float scale) const {
    constexpr float kSlack = 8.0f;
    return score * scale > kSlack - neg_reference[m][h];
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
  __device__ __forceinline__ void exponentiate(float (&acc_s)[kRowTiles][kGroups][4], float scale,
                                               float (&sums)[kRowTiles][2]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      sums[m][0] = sums[m][1] = 0.0f;
#pragma unroll
      for (int j = kFirst / 8; j < (kFirst + kKeys) / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          acc_s[m][j][e] = ptx::exp2(fmaf(acc_s[m][j][e], scale, neg_reference[m][e / 2]));
          sums[m][e / 2] += acc_s[m][j][e];
        }
      }
    }
  }

  // Whether a sum of the warp's exceeds `most`.
  __device__ __forceinline__ static bool any_above(const float (&sums)[kRowTiles][2], float most) {
    bool above = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) above |= sums[m][0] > most || sums[m][1] > most;
    return __any_sync(tile::kFullMask, above);
  }

  // Raises the references of the rows whose sums are 2 or more, so far that these come to 1 or a
  // little more, and scales probabilities and sums to them. All lanes call it.
  template <int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ void scale_down(float (&probabilities)[kRowTiles][kGroups][4],
                                             float (&sums)[kRowTiles][2],
                                             float (&acc_o)[kRowTiles][kOutGroups][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int shift = tile::raise_by(tile::reduce_sum<4>(sums[m][h]));
        const float factor = raise(m, h, neg_reference[m][h] - static_cast<float>(shift), acc_o);
        sums[m][h] *= factor;
#pragma unroll
        for (int j = kFirst / 8; j < (kFirst + kKeys) / 8; ++j)
          probabilities[m][j][2 * h] *= factor, probabilities[m][j][2 * h + 1] *= factor;
      }
    }
  }

  // Gives a row its new reference and scales what it has accumulated, by the factor returned.
  template <int kOutGroups>
  __device__ __forceinline__ float raise(int m, int h, float new_neg_reference,
                                         float (&acc_o)[kRowTiles][kOutGroups][4]) {
    const float factor = ptx::exp2(new_neg_reference - neg_reference[m][h]);
    neg_reference[m][h] = new_neg_reference;
    row_sum[m][h] *= factor;
#pragma unroll
    for (int j = 0; j < kOutGroups; ++j)
      acc_o[m][j][2 * h] *= factor, acc_o[m][j][2 * h + 1] *= factor;
    return factor;
  }
};

}  // namespace dlattn::wmma
