#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/backward/sm90/products.cuh"
#include "cuda/backward/sm90/setup.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/wgmma/accumulators.cuh"
#include "cuda/tile/wgmma/mask.cuh"

// From scores to their gradients, in the accumulators of a consumer's 64 keys and a step's queries:
// element 4 j + 2 h + e is of the lane's key 8 h and its query 8 j + e.
namespace dlattn::backward_sm90 {

// From q.k to P.
template <int kScores>
__device__ __forceinline__ void to_probabilities(float (&acc_s)[kScores], float scale_log2,
                                                 const RowStatsPair* stats) {
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    const RowStatsPair pair = stats[4 * j];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = acc_s[4 * j + i];
      x = ptx::exp2(fmaf(x, scale_log2, -pair.lse[i % 2]));
    }
  }
}

// The same from scores that are modified. `to_log2`: their unit's and lse's in base 2.
template <int kScores>
__device__ __forceinline__ void to_probabilities_by_difference(float (&acc_s)[kScores],
                                                               float to_log2,
                                                               const RowStatsPair* stats) {
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    const RowStatsPair pair = stats[4 * j];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = acc_s[4 * j + i];
      x = ptx::exp2(tile::less_lse(x, pair.lse[i % 2]) * to_log2);
    }
  }
}

// Scales q.k and takes ALiBi's penalties. `distance`: of the lane's first query from its first key.
template <int kScores>
__device__ __forceinline__ void add_alibi(float (&acc_s)[kScores], float scale, float slope,
                                          float distance) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const auto further = static_cast<float>(i / 4 * 8 + i % 2 - i / 2 % 2 * 8);
    acc_s[i] = __fadd_rn(acc_s[i] * scale, -alibi_penalty(slope, distance + further));
  }
}

// The sum of gradients of scores, each times its query's distance from its key.
template <int kScores>
__device__ __forceinline__ float distance_sum(const float (&ds)[kScores], float distance) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const auto further = static_cast<float>(i / 4 * 8 + i % 2 - i / 2 % 2 * 8);
    sum = fmaf(ds[i], fabsf(distance + further), sum);
  }
  return sum;
}

// acc_s = acc_s * scale + a tile of numbers of T, which lies as dS^T does; `row`: score_row().
template <typename T, int kScores>
__device__ __forceinline__ void add_score_tile(float (&acc_s)[kScores], float scale,
                                               ptx::SmemAddress row) {
#pragma unroll
  for (int m = 0; m < 2 * kScores; m += 16) {
    std::uint32_t pairs[4];
    ptx::ldmatrix_x4_trans(pairs, row + m * kBlockRowBytes);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      T pair[2];
      memcpy(static_cast<void*>(pair), &pairs[e], sizeof pair);  // T has constructors
      float* const s = acc_s + m / 2 + 2 * e;
      s[0] = fmaf(s[0], scale, tile::to_float(pair[0]));
      s[1] = fmaf(s[1], scale, tile::to_float(pair[1]));
    }
  }
}

// Which of a lane's scores are of queries that see their keys: bit i of key 8 h is of its query
// 8 (i / 2) + i % 2.
struct VisibleQueries {
  std::uint32_t bits[2];

  __device__ __forceinline__ bool contains(int score) const {
    return (bits[score / 2 % 2] & 1u << (score / 4 * 2 + score % 2)) != 0;
  }
};

// `key` and `query` are the lane's first ones.
template <int kBlockM>
__device__ __forceinline__ VisibleQueries visible_queries(const tile::Mask& mask, int key,
                                                          int query) {
  static_assert(kBlockM / 4 <= 32, "a word holds a key's bits");
  VisibleQueries visible;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const tile::Range queries = mask.column(key + 8 * h);
    const int begin = tile::wgmma::scores_before<kBlockM>(max(queries.begin, 0) - query);
    const int end = tile::wgmma::scores_before<kBlockM>(max(queries.end, 0) - query);
    const int count = max(end - begin, 0);
    const auto ones = static_cast<std::uint32_t>((std::uint64_t{0xffffffff} << count) >> 32);
    visible.bits[h] = ones << (begin % 32);  // 32 only where count is 0
  }
  return visible;
}

// Probabilities of keys that their queries do not see become 0.
template <int kScores>
__device__ __forceinline__ void hide(float (&probabilities)[kScores],
                                     const VisibleQueries& visible) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    if (!visible.contains(i)) probabilities[i] = 0.0f;
  }
}

// dS = P (dP - delta), in place of dP.
template <int kScores>
__device__ __forceinline__ void to_score_gradients(float (&acc_dp)[kScores],
                                                   const float (&probabilities)[kScores],
                                                   const RowStatsPair* stats) {
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    const RowStatsPair pair = stats[4 * j];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = acc_dp[4 * j + i];
      x = probabilities[4 * j + i] * (x - pair.delta[i % 2]);
    }
  }
}

// With softcap, from q.k to tanh of a score's share of the cap.
template <int kScores>
__device__ __forceinline__ void to_tanh(float (&acc_s)[kScores], float scale) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) acc_s[i] = tile::tanh(acc_s[i] * scale);
}

// Then to P and to the gradient before softcap, P (dP - delta) (1 - tanh^2), packed.
template <typename T, int kScores>
__device__ __forceinline__ void pack_capped(std::uint32_t (&rP)[kScores / 8][4],
                                            std::uint32_t (&rDS)[kScores / 8][4],
                                            const float (&tanhs)[kScores],
                                            const float (&acc_dp)[kScores], float cap_log2,
                                            const RowStatsPair* stats,
                                            const VisibleQueries& visible) {
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    const RowStatsPair pair = stats[4 * j];
    float p[4], ds[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = tanhs[4 * j + i];
      const float power = ptx::exp2(fmaf(x, cap_log2, -pair.lse[i % 2]));
      p[i] = visible.contains(4 * j + i) ? power : 0.0f;
      ds[i] = p[i] * fmaf(-x, x, 1.0f) * (acc_dp[4 * j + i] - pair.delta[i % 2]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rP[j / 2][j % 2 * 2 + h] = tile::pack<T>(p[2 * h], p[2 * h + 1]);
      rDS[j / 2][j % 2 * 2 + h] = tile::pack<T>(ds[2 * h], ds[2 * h + 1]);
    }
  }
}

}  // namespace dlattn::backward_sm90
