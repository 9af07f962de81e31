#pragma once

#include <cmath>
#include <cstdint>

#include "core/problem/descales.h"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/warp.cuh"

// Scores in the accumulators of multiply_qk, and the probabilities that become of them. Of 8 keys a
// lane has 2 t and the next, t being lane % 4, of two rows that are 8 apart.
namespace dlattn::wmma8 {

// Probabilities are times 2^kShift: the largest of a row is 256, near the end of e4m3, so that of
// smaller ones down to 2^-14 of it are normal numbers.
constexpr int kShift = 8;

// Makes scores of the products q.k of one head. One number is kept, as registers are scarce.
template <bool kGeneral>
struct ScoreScale {
  const LaunchShape& shape;
  float of_products;  // to natural scores with softcap, else to base 2

  // It is never 0: -inf of a key that is not seen would become NaN. It stays NaN.
  __device__ __forceinline__ ScoreScale(const LaunchShape& shape, float descale) : shape(shape) {
    constexpr float kLeast = 0x1p-126f;
    // seed: descales
    const float scale = (has_softcap() ? shape.softmax_scale : shape.scale_log2) * descale;
    of_products = scale < kLeast ? kLeast : scale;
  }

  __device__ __forceinline__ bool has_softcap() const { return kGeneral && shape.softcap != 0.0f; }
  // The factor that puts scores in base 2, as softcap leaves them.
  __device__ __forceinline__ float log2() const {
    return has_softcap() ? tile::kLog2e : of_products;
  }

  // Scores become natural ones: cap * tanh(score / cap).
  template <int kRowTiles, int kGroups>
  __device__ __forceinline__ void apply_softcap(float (&acc_s)[kRowTiles][kGroups][4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float score = acc_s[m][j][e] * of_products;
          acc_s[m][j][e] = shape.softcap * tile::tanh(score * shape.inverse_softcap);
        }
      }
    }
  }
};

// Sets scores of keys that their rows do not see to -inf.
template <int kRowTiles, int kGroups>
__device__ __forceinline__ void apply_mask(float (&acc_s)[kRowTiles][kGroups][4],
                                           const tile::Mask& mask, int lane) {
  const int first_key = lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Keys are counted from this lane's first, so that they are constants below.
      const tile::Range visible = mask.row(lane / 4 + 16 * m + 8 * h, first_key);
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          // seed: hide-keys
          if (!tile::contains(visible, 8 * j + e)) acc_s[m][j][2 * h + e] = -INFINITY;
        }
      }
    }
  }
}

// P = 2^(S - row max) of a tile, in place, times 2^kShift; raises the row max before. `softmax` is
// a row's, with this lane's part of the sum, which is that of P before it is rounded. Returns the
// factor of what was accumulated before.
template <int kGroups>
__device__ __forceinline__ float probabilities(tile::OnlineSoftmax& softmax,
                                               float (&acc_s)[kGroups][4], int h, float scale) {
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kGroups; ++j)
    largest = fmaxf(largest, fmaxf(acc_s[j][2 * h], acc_s[j][2 * h + 1]));
  // seed: row-max
  const float factor = softmax.raise_max(tile::reduce_max<4>(largest), scale);
  const float base = softmax.finite_max();
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int e = 2 * h; e < 2 * h + 2; ++e) {
      acc_s[j][e] = ptx::exp2(fmaf(acc_s[j][e] - base, scale, static_cast<float>(kShift)));
      sum += acc_s[j][e];
    }
  }
  softmax.row_sum += sum;
  return factor;
}

// P in e4m3, as operand a of multiply_pv: k = 4 t + (0, 1, 2, 3) of 16 are the lane's keys of two
// groups, 2 t + (0, 1, 8, 9).
template <int kKeys>
__device__ __forceinline__ void pack(std::uint32_t (&rP)[kKeys / 32][4],
                                     const float (&p)[kKeys / 8][4]) {
#pragma unroll
  for (int n = 0; n < kKeys / 32; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 4 * n + i / 2 * 2, e = i % 2 * 2;
      // seed: pack-keys
      rP[n][i] = ptx::convert_e4m3x4(p[j][e], p[j][e + 1], p[j + 1][e], p[j + 1][e + 1]);
    }
  }
}

// P in fp16, as operand a of multiply_half_pv: the lane's keys are those of its scores.
template <int kKeys>
__device__ __forceinline__ void pack_half(std::uint32_t (&rP)[kKeys / 16][4],
                                          const float (&p)[kKeys / 8][4]) {
#pragma unroll
  for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 2 * n + i / 2, e = i % 2 * 2;
      const half2 pair = __floats2half2_rn(p[j][e], p[j][e + 1]);
      memcpy(&rP[n][i], &pair, sizeof pair);
    }
  }
}

}  // namespace dlattn::wmma8
