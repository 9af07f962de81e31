#pragma once

#include <cmath>
#include <cstdint>

#include "core/problem/descales.h"
#include "cuda/forward/wmma8/given_rows.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/e4m3_softmax.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/warp.cuh"

// Scores in the accumulators of multiply_qk, and the probabilities that become of them. Of 8 keys a
// lane has 2 t and the next, t being lane % 4, of two rows that are 8 apart.
namespace dlattn::wmma8 {

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

// Makes scores of the products q.k of one head. One number is kept, as registers are scarce.
template <bool kGeneral, bool kSoftcap>
struct ScoreScale {
  const LaunchShape& shape;
  GivenRowsOf<kGeneral> given;
  float of_products;  // to natural scores, if they become that, else to base 2

  // It is never 0: -inf of a key that is not seen would become NaN. It stays NaN.
  __device__ __forceinline__ ScoreScale(const LaunchShape& shape, float descale,
                                        const GivenRowsOf<kGeneral>& given)
      : shape(shape), given(given) {
    constexpr float kLeast = 0x1p-126f;
    // seed: descales
    const float scale = (is_natural() ? shape.softmax_scale : shape.scale_log2) * descale;
    of_products = scale < kLeast ? kLeast : scale;
  }

  // Whether scores become natural before the softmax. With a mask too: a row of which it hides all
  // keys has nothing of a descale that is NaN.
  __device__ __forceinline__ bool is_natural() const {
    if constexpr (kGeneral) return shape.natural || given.has_mask();
    return false;
  }
  // The factor that puts scores in base 2.
  __device__ __forceinline__ float log2() const {
    return is_natural() ? tile::kLog2e : of_products;
  }

  // Softcap, bias and the caller's mask on the products of a tile, and the mask by position.
  // `tile`: counted from the sequence's first. In general kernels alone.
  template <int kRowTiles, int kGroups>
  __device__ __forceinline__ void apply(float (&acc_s)[kRowTiles][kGroups][4],
                                        const tile::Mask& mask, int tile, int lane) const {
    const int first_key = tile * (8 * kGroups);
    if (is_natural()) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) acc_s[m][j][e] *= of_products;
        }
      }
    }
    if constexpr (kSoftcap) {
      if (shape.softcap != 0.0f) apply_softcap(acc_s);
    }
    if (given.has_bias()) given.scores().add_bias(acc_s, mask, first_key, lane);
    if (given.has_mask()) return given.scores().hide(acc_s, mask, first_key, lane);
    if (!tile::contains_all(mask.every_row(0, 16 * kRowTiles - 1), 0, 8 * kGroups))
      apply_mask(acc_s, mask, lane);
  }

 private:
  // cap * tanh(score / cap).
  template <int kRowTiles, int kGroups>
  __device__ __forceinline__ void apply_softcap(float (&acc_s)[kRowTiles][kGroups][4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          acc_s[m][j][e] = shape.softcap * tile::tanh(acc_s[m][j][e] * shape.inverse_softcap);
        }
      }
    }
  }
};

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
