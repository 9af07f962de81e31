#pragma once

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::sm90 {

// The most that a lane's probabilities of a tile may come to: what T, which holds each of them, has
// room for. Of bfloat16's room, which is fp32's, enough is left for V and for the sums.
template <typename T>
constexpr float kMaxSum = 0x1p15f;
template <>
constexpr float kMaxSum<__nv_bfloat16> = 0x1p60f;

// How far above the maximum a reference is raised, in powers of two: so much the later it is
// outgrown. Probabilities of half then begin at 2^-6, far from where they lose bits.
template <typename T>
constexpr float kHeadroom = 6.0f;
template <>
constexpr float kHeadroom<__nv_bfloat16> = 0.0f;

// The streaming softmax of this lane's two rows of its warp's 16, with a reference in place of the
// running maximum: probabilities are 2^(score - reference), with references as they stand and no
// maximum worked out. The sums, which are needed anyway, tell whether a row has outgrown its
// reference; then references are raised to the maxima and the tile is done again, which is the
// plain softmax. The reference cancels in out and lse. Scores here are raw products q.k; `scale` is
// softmax_scale * log2(e). kScores: the lane's scores of a tile, [4 j + 2 h + e] of row h.
struct Softmax {
  // -reference of a row that has seen nothing: with it any finite score is too large, and -inf
  // gives 0.
  static constexpr float kNothing = 3.402823466e+38f;

  float neg_reference[2] = {kNothing, kNothing};
  float row_sum[2] = {0.0f, 0.0f};  // this lane's part

  // Raises the references that a score exceeds to kHeadroom above the row's maximum. `factors`:
  // what the rows have accumulated must be multiplied with; the sums are. All lanes call it.
  template <typename T, int kScores>
  __device__ __forceinline__ void raise(const float (&acc_s)[kScores], float scale,
                                        float (&factors)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float even = acc_s[2 * h], odd = acc_s[2 * h + 1];
#pragma unroll
      for (int j = 1; j < kScores / 4; ++j) {
        even = fmaxf(even, acc_s[4 * j + 2 * h]);
        odd = fmaxf(odd, acc_s[4 * j + 2 * h + 1]);
      }
      const float row_max = tile::reduce_max<4>(fmaxf(even, odd));
      const float old = neg_reference[h];
      // A row without a finite maximum keeps what it has.
      const float neg_max = -row_max * scale;
      neg_reference[h] = neg_max < old ? neg_max - kHeadroom<T> : old;
      factors[h] = ptx::exp2(neg_reference[h] - old);
      row_sum[h] *= factors[h];
    }
  }

  // Scores to probabilities, in place, and their sums.
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&acc_s)[kScores], float scale,
                                               float (&sums)[2]) const {
    exponentiate(acc_s, scale, neg_reference, sums);
  }
  template <int kScores>
  __device__ __forceinline__ static void exponentiate(float (&acc_s)[kScores], float scale,
                                                      const float (&neg_reference)[2],
                                                      float (&sums)[2]) {
    float parts[4] = {};
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        acc_s[4 * j + e] = ptx::exp2(fmaf(acc_s[4 * j + e], scale, neg_reference[e / 2]));
        parts[e] += acc_s[4 * j + e];
      }
    }
    sums[0] = parts[0] + parts[1];
    sums[1] = parts[2] + parts[3];
  }

  // Whether a row of the warp has outgrown its reference, or `void_scores` in a lane. All lanes
  // call it.
  template <typename T>
  __device__ __forceinline__ static bool outgrown(const float (&sums)[2],
                                                  bool void_scores = false) {
    return __any_sync(tile::kFullMask, void_scores || sums[0] > kMaxSum<T> || sums[1] > kMaxSum<T>);
  }

  __device__ __forceinline__ void add(const float (&sums)[2]) {
    row_sum[0] += sums[0];
    row_sum[1] += sums[1];
  }

  // A row's state, with the whole row's sum. All lanes call it.
  __device__ __forceinline__ tile::OnlineSoftmax row(int h) const {
    const float reference = -neg_reference[h];
    return {reference == -kNothing ? -INFINITY : reference, tile::reduce_sum<4>(row_sum[h])};
  }
};

// Probabilities as the operand of the product with V: the accumulators of two neighbouring groups
// of 8 keys are, packed, what the lane holds of the 16 x 16 operand.
template <typename T, int kScores>
__device__ __forceinline__ void pack_probabilities(std::uint32_t (&rP)[kScores / 8][4],
                                                   const float (&acc_s)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      rP[i][e] = tile::pack<T>(acc_s[8 * i + 2 * e], acc_s[8 * i + 2 * e + 1]);
  }
}

// Multiplies each row of accumulators with its factor.
template <int kCount>
__device__ __forceinline__ void rescale(float (&acc)[kCount], const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] *= factors[i / 2 % 2];
}

}  // namespace dlattn::sm90
