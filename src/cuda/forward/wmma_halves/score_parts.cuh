#pragma once

#include "cuda/forward/wmma_halves/traits.h"
#include "cuda/tile/score.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::wmma_halves {

// The scores of a pair of warps, which are the sum of what each warp's columns give. A lane's
// scores are those of its accumulators, in both warps: it reads only what that lane of the other
// warp wrote.
struct ScoreParts {
  static constexpr int kGroups = kBlockN / 8;
  using Part = tile::Vec<float, 4>[kGroups][32];

  Part& own;
  Part& other;
  const int half;
  const int lane;

  // `parts`: those of all pairs.
  __device__ __forceinline__ ScoreParts(unsigned char* parts, int pair, int half, int lane)
      : own(reinterpret_cast<Part*>(parts)[kHalves * pair + half]),
        other(reinterpret_cast<Part*>(parts)[kHalves * pair + 1 - half]),
        half(half),
        lane(lane) {}

  __device__ __forceinline__ void store(const float (&acc_s)[1][kGroups][4]) const {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) tile::store(own[j][lane].x, acc_s[0][j]);
  }

  // Adds up the parts. Both warps get the same bits.
  __device__ __forceinline__ void load(float (&acc_s)[1][kGroups][4]) const {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      float x[4];
      tile::load(acc_s[0][j], own[j][lane].x);
      tile::load(x, other[j][lane].x);
#pragma unroll
      // seed: add-parts
      for (int e = 0; e < 4; ++e) acc_s[0][j][e] += x[e];
    }
  }

  // Turns the sums into natural scores. This warp does the columns of its half of the groups, of
  // which the other warp's part then counts as 0. The loop is rolled: unrolled, it is much code and
  // takes too many registers. `first_row`: the pair's; `n0`: the tile's first key.
  template <typename T>
  __device__ __forceinline__ void modify(const tile::HeadScoreMod<T>& score_mod, int first_row,
                                         int n0, int seqlen_q, int seqlen_k, int shift) const {
    constexpr int kElements = kGroups / kHalves * 4;
#pragma unroll 1
    for (int i = half * kElements; i < (half + 1) * kElements; ++i) {
      const int j = i / 4, e = i % 4;
      const int row = first_row + lane / 4 + 8 * (e / 2);
      const int key = n0 + 8 * j + lane % 4 * 2 + e % 2;
      float& x = own[j][lane].x[e];
      float& rest = other[j][lane].x[e];
      if (row < seqlen_q && key < seqlen_k) x = score_mod(x + rest, row, key, shift);
      // seed: modified-rest
      rest = 0.0f;
    }
  }
};

}  // namespace dlattn::wmma_halves
