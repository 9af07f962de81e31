#pragma once

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::wmma {

// Accumulators of kRowTiles x kColumns / 8 products of m16n8k16. Of row tile m a lane has two rows,
// h = 0 and 1: row 16 m + 8 h + lane / 4, in elements 2 h and 2 h + 1 of each.
template <int kRowTiles, int kColumns>
using Accumulators = float[kRowTiles][kColumns / 8][4];

// The streaming softmax of a warp's rows with a lazy maximum. Probabilities are taken relative to a
// reference that is raised to the row's maximum only when a score exceeds it by more than 8 in base
// 2; until then probabilities grow to at most 2^8, which neither 16-bit type nor the fp32 sums
// mind, and the output needs no rescaling. The reference cancels in out and lse, so the result is
// the plain softmax's. Scores here are raw products q.k; `scale` is softmax_scale * log2(e).
template <int kRowTiles>
struct LazySoftmax {
  static constexpr float kSlack = 8.0f;
  // -reference of a row that has seen nothing: any finite score outgrows it, and -inf + it is -inf.
  static constexpr float kNothing = 3.402823466e+38f;

  float neg_reference[kRowTiles][2];
  float row_sum[kRowTiles][2];  // this lane's part

  __device__ __forceinline__ LazySoftmax() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) neg_reference[m][h] = kNothing, row_sum[m][h] = 0.0f;
    }
  }

  // Whether some score of this lane exceeds its row's reference by more than the slack.
  template <int kGroups>
  __device__ __forceinline__ bool outgrown(const float (&acc_s)[kRowTiles][kGroups][4],
                                           float scale) const {
    bool any = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        any |= fmaf(lane_max(acc_s[m], h), scale, neg_reference[m][h]) > kSlack;
    }
    return any;
  }

  // Raises the references of the rows that have outgrown them to the maxima seen, and scales what
  // those rows have accumulated. Each row decides for itself, so that its result does not depend on
  // its neighbours. A NaN score is no maximum, but its probability is NaN, so that it reaches sum
  // and output.
  template <int kGroups, int kOutGroups>
  __device__ __forceinline__ void raise(const float (&acc_s)[kRowTiles][kGroups][4], float scale,
                                        float (&acc_o)[kRowTiles][kOutGroups][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float row_max = tile::reduce_max<4>(lane_max(acc_s[m], h));
        const float old = neg_reference[m][h];
        if (fmaf(row_max, scale, old) > kSlack) neg_reference[m][h] = -row_max * scale;
        const float factor = ptx::exp2(neg_reference[m][h] - old);
        row_sum[m][h] *= factor;
#pragma unroll
        for (int j = 0; j < kOutGroups; ++j)
          acc_o[m][j][2 * h] *= factor, acc_o[m][j][2 * h + 1] *= factor;
      }
    }
  }

  // The probabilities of keys kFirst .. kFirst + kKeys - 1 of the tile, added to the sums, as the
  // operands of products with V. The accumulators of two neighbouring groups of 8 keys are, packed,
  // the 16 x 16 operand of the lane: no data moves between lanes.
  template <typename T, int kFirst, int kKeys, int kGroups>
  __device__ __forceinline__ void probabilities(
      const float (&acc_s)[kRowTiles][kGroups][4], float scale,
      std::uint32_t (&rP)[kRowTiles][kKeys / 16][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        float p[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          p[e] = ptx::exp2(fmaf(acc_s[m][kFirst / 8 + j][e], scale, neg_reference[m][e / 2]));
          sum[e / 2] += p[e];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
          rP[m][j / 2][j % 2 * 2 + h] = tile::pack<T>(p[2 * h], p[2 * h + 1]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) row_sum[m][h] += sum[h];
    }
  }

  // A row's state, with the whole row's sum. All lanes call it.
  __device__ __forceinline__ tile::OnlineSoftmax row(int m, int h) const {
    const float reference = -neg_reference[m][h];
    return {reference == -kNothing ? -INFINITY : reference, tile::reduce_sum<4>(row_sum[m][h])};
  }

 private:
  template <int kGroups>
  __device__ __forceinline__ static float lane_max(const float (&acc)[kGroups][4], int h) {
    float x = acc[0][2 * h];
#pragma unroll
    for (int j = 0; j < kGroups; ++j) x = fmaxf(x, fmaxf(acc[j][2 * h], acc[j][2 * h + 1]));
    return x;
  }
};

}  // namespace dlattn::wmma
