#pragma once

#include "cuda/sm90/accumulators.cuh"
#include "cuda/tile/reference.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::sm90 {

// The streaming softmax of this lane's two rows of its warp's 16, with a reference in place of the
// running maximum: probabilities are 2^(score - reference), with references as they stand and no
// maximum worked out. The sums, which are needed anyway, tell whether a row has outgrown its
// reference, and by how much: then references are raised and the probabilities, still in fp32,
// scaled down. Where fp32 was too small for them, the tile is done again with references raised to
// the maxima, which is the plain softmax, and so are the next ones while such leaps go on. The
// reference cancels in out and lse. Scores here are raw products q.k; `scale` is softmax_scale *
// log2(e). kScores: the lane's scores of a tile, [4 j + 2 h + e] of row h.
struct Softmax {
  float neg_reference[2] = {tile::kNothing, tile::kNothing};
  float row_sum[2] = {0.0f, 0.0f};  // this lane's part

  // Raises the references that a score exceeds to the row's maximum. `factors`: what the rows have
  // accumulated must be multiplied with; the sums are. All lanes call it.
  template <int kScores>
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
      // A row that sees nothing, or NaN alone, keeps what it has.
      neg_reference[h] = fminf(old, -row_max * scale);
      factors[h] = ptx::exp2(neg_reference[h] - old);
      row_sum[h] *= factors[h];
    }
  }

  // Whether a reference of the warp's was raised so far that the next tile's scores may well be
  // beyond what fp32 holds of them. All lanes call it.
  __device__ __forceinline__ static bool leapt(const float (&factors)[2]) {
    constexpr float kLeap = 0x1p-60f;
    return __any_sync(tile::kFullMask, factors[0] < kLeap || factors[1] < kLeap);
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

  // Whether a row of the warp has outgrown its reference. All lanes call it.
  template <typename T>
  __device__ __forceinline__ bool outgrown(const float (&sums)[2]) const {
    return __any_sync(tile::kFullMask, sums[0] > tile::kMaxSum<T> || sums[1] > tile::kMaxSum<T>);
  }

  // Raises the references of the rows whose sums are 2 or more, so far that these come to 1 or a
  // little more, and scales probabilities and sums to them. `factors` as above. Does nothing and
  // returns false where a sum of the warp's is too large for that. All lanes call it.
  template <int kScores>
  __device__ __forceinline__ bool scale_down(float (&probabilities)[kScores], float (&sums)[2],
                                             float (&factors)[2]) {
    const float row_sums[2] = {tile::reduce_sum<4>(sums[0]), tile::reduce_sum<4>(sums[1])};
    if (__any_sync(tile::kFullMask, row_sums[0] > tile::kLargest || row_sums[1] > tile::kLargest))
      return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float old = neg_reference[h];
      neg_reference[h] = old - static_cast<float>(tile::raise_by(row_sums[h]));
      factors[h] = ptx::exp2(neg_reference[h] - old);
      row_sum[h] *= factors[h];
      sums[h] *= factors[h];
    }
    rescale(probabilities, factors);
    return true;
  }

  __device__ __forceinline__ void add(const float (&sums)[2]) {
    row_sum[0] += sums[0];
    row_sum[1] += sums[1];
  }

  // A row's state, with the whole row's sum. All lanes call it.
  __device__ __forceinline__ tile::OnlineSoftmax row(int h) const {
    return tile::row_state(neg_reference[h], tile::reduce_sum<4>(row_sum[h]));
  }
};

}  // namespace dlattn::sm90
