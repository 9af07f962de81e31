#pragma once

// The plain streaming softmax in the place of wmma's own: the kernels' source, compiled with this
// folder in front of src, is the same but for it. For research/softmax_forms.py alone.

#include "cuda/tile/row_max.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::tile::mma {

// The rows' maxima of each tile are computed first and the accumulators are scaled to them,
// whatever the scores. So none are ever made again.
template <int kRowTiles>
struct PlainSoftmax {
  // -maximum of a row that has seen nothing: with it -inf gives 0.
  static constexpr float kNothing = 3.402823466e+38f;

  float neg_max[kRowTiles][2];  // in powers of 2
  float row_sum[kRowTiles][2];  // this lane's part

  __device__ __forceinline__ PlainSoftmax() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) neg_max[m][h] = kNothing, row_sum[m][h] = 0.0f;
    }
  }

  static constexpr bool unscaled = false;

  // As of wmma's own, but that row maxima always hold. A tile that is gone through in slices has
  // its maximum taken once.
  template <int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ bool speculate(float (&acc_s)[kRowTiles][kGroups][4], float scale,
                                            float (&acc_o)[kRowTiles][kOutGroups][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (kFirst == 0) raise(m, acc_s[m], scale, acc_o[m]);
#pragma unroll
      for (int j = kFirst / 8; j < (kFirst + kKeys) / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          acc_s[m][j][e] = ptx::exp2(fmaf(acc_s[m][j][e], scale, neg_max[m][e / 2]));
          row_sum[m][e / 2] += acc_s[m][j][e];
        }
      }
    }
    return true;
  }

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

  template <typename T, int kFirst, int kKeys, int kGroups, int kOutGroups>
  __device__ __forceinline__ void first_probabilities(float (&acc_s)[kRowTiles][kGroups][4],
                                                      float scale, bool,
                                                      std::uint32_t (&rP)[kRowTiles][kKeys / 16][4],
                                                      float (&acc_o)[kRowTiles][kOutGroups][4]) {
    speculate<kFirst, kKeys>(acc_s, scale, acc_o);
    pack<T, kFirst, kKeys>(acc_s, rP);
  }

  // A row's result, of all its scores. All lanes call it.
  __device__ __forceinline__ tile::RowResult finalize(int m, int h, float scale,
                                                      const float* sink) const {
    return tile::finalize(tile::RowMax(neg_max[m][h], false), scale,
                          tile::reduce_sum<4>(row_sum[m][h]), sink);
  }

 private:
  // Takes in the maxima of all scores of row tile m.
  template <int kGroups, int kOutGroups>
  __device__ __forceinline__ void raise(int m, const float (&acc_s)[kGroups][4], float scale,
                                        float (&acc_o)[kOutGroups][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float tile_max = acc_s[0][2 * h];
#pragma unroll
      for (int j = 0; j < kGroups; ++j)
        tile_max = fmaxf(tile_max, fmaxf(acc_s[j][2 * h], acc_s[j][2 * h + 1]));
      const float old = neg_max[m][h];
      neg_max[m][h] = fminf(old, -tile::reduce_max<4>(tile_max) * scale);
      const float factor = ptx::exp2(neg_max[m][h] - old);
      row_sum[m][h] *= factor;
#pragma unroll
      for (int j = 0; j < kOutGroups; ++j) acc_o[j][2 * h] *= factor, acc_o[j][2 * h + 1] *= factor;
    }
  }
};

template <int kRowTiles>
using SpeculativeSoftmax = PlainSoftmax<kRowTiles>;

}  // namespace dlattn::tile::mma
