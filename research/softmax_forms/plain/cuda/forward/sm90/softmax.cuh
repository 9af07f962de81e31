#pragma once

// The plain streaming softmax in the place of sm90's own: the kernels' source, compiled with this
// folder in front of src, is the same but for it. For research/softmax_forms.py alone.

#include "cuda/tile/row_max.cuh"
#include "cuda/tile/warp.cuh"
#include "cuda/tile/wgmma/accumulators.cuh"

namespace dlattn::sm90 {

// The rows' maxima of each tile are computed first. What has been accumulated is scaled to them
// where one of the warp's rises, which takes a vote and a branch, as every known kernel for Hopper
// has it: that branch is the consumer's for rows whose row max does not fit.
struct Softmax {
  // -maximum of a row that has seen nothing: with it -inf gives 0.
  static constexpr float kNothing = 3.402823466e+38f;

  // Mutable: to the kernel, exponentiate() changes nothing.
  mutable float words[2] = {kNothing, kNothing};  // -maxima in powers of 2
  mutable float row_sum[2] = {0.0f, 0.0f};        // this lane's part
  mutable float tile_factors[2] = {1.0f, 1.0f};   // needed by the last tile's maxima

  // Stands in for kernels with score terms, which have no plain form.
  __device__ __forceinline__ static bool unscaled() { return false; }
  __device__ __forceinline__ static unsigned met() { return 0; }
  __device__ __forceinline__ static void set_met(unsigned) {}
  template <int kScores>
  __device__ __forceinline__ void raise_any(const float (&acc_s)[kScores], float scale, bool,
                                            float (&factors)[2]) {
    raise(acc_s, scale, factors);
  }

  // As of sm90's own. exponentiate() raises.
  __device__ __forceinline__ static bool raises_first() { return false; }
  template <int kScores>
  __device__ __forceinline__ void raise(const float (&)[kScores], float, float (&factors)[2]) {
    factors[0] = factors[1] = 1.0f;
  }
  __device__ __forceinline__ static void expect_overflow(const float (&)[2]) {}
  template <int kScores>
  __device__ __forceinline__ void begin(const float (&acc_s)[kScores], float scale,
                                        float (&probabilities)[kScores], float (&sums)[2]) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) probabilities[i] = acc_s[i];
    exponentiate(probabilities, scale, sums);
    add(sums);
  }
  template <int kScores>
  __device__ __forceinline__ void exponentiate_raised(float (&acc_s)[kScores], float scale,
                                                      float (&sums)[2]) const {
    exponentiate(acc_s, scale, sums);
  }

  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&acc_s)[kScores], float scale,
                                               float (&sums)[2]) const {
    float parts[4] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float even = acc_s[2 * h], odd = acc_s[2 * h + 1];
#pragma unroll
      for (int j = 1; j < kScores / 4; ++j) {
        even = fmaxf(even, acc_s[4 * j + 2 * h]);
        odd = fmaxf(odd, acc_s[4 * j + 2 * h + 1]);
      }
      const float old = words[h];
      words[h] = fminf(old, -tile::reduce_max<4>(fmaxf(even, odd)) * scale);
      tile_factors[h] = ptx::exp2(words[h] - old);
      row_sum[h] *= tile_factors[h];
    }
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        acc_s[4 * j + e] = ptx::exp2(fmaf(acc_s[4 * j + e], scale, words[e / 2]));
        parts[e] += acc_s[4 * j + e];
      }
    }
    sums[0] = parts[0] + parts[1];
    sums[1] = parts[2] + parts[3];
  }

  __device__ __forceinline__ bool overflows(const float (&)[2]) const {
    return __any_sync(tile::kFullMask, tile_factors[0] < 1.0f || tile_factors[1] < 1.0f);
  }

  // False never, but that is for the compiler not to know: the consumer's branch keeps it from
  // waiting for the product with V too early.
  template <int kScores>
  __device__ __forceinline__ bool scale_down(float (&)[kScores], float (&sums)[2],
                                             float (&factors)[2]) const {
    factors[0] = tile_factors[0], factors[1] = tile_factors[1];
    constexpr float kImpossible = 0x1p100f;
    return !__any_sync(tile::kFullMask, sums[0] > kImpossible || sums[1] > kImpossible);
  }

  __device__ __forceinline__ void add(const float (&sums)[2]) {
    row_sum[0] += sums[0];
    row_sum[1] += sums[1];
  }

  // A row's result, of all its scores. All lanes call it.
  __device__ __forceinline__ tile::RowResult finalize(int h, float scale, const float* sink) const {
    return tile::finalize(tile::RowMax(words[h], false), scale, tile::reduce_sum<4>(row_sum[h]),
                          sink);
  }
};

}  // namespace dlattn::sm90
