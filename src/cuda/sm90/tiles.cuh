#pragma once

#include <cmath>

#include "cuda/sm90/setup.cuh"
#include "cuda/sm90/traits.h"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/scheduler.cuh"

// Which tiles of keys are walked, and what of them rows see.
namespace dlattn::sm90 {

// Work items of the whole problem; a thread block takes every gridDim.x-th.
__device__ __forceinline__ unsigned num_works(const AttentionParams& params,
                                              const LaunchShape& shape) {
  return shape.num_m_blocks.divisor() * shape.num_heads.divisor() *
         static_cast<unsigned>(params.batch_size);
}

__device__ __forceinline__ tile::Mask position_mask(const AttentionParams& params,
                                                    const LaunchShape& shape) {
  const int seqlen_k = static_cast<int>(params.seqlen_k);
  const int shift =
      params.causal == Causal::kTopLeft ? 0 : seqlen_k - static_cast<int>(params.seqlen_q);
  return tile::Mask(shape, shift, seqlen_k);
}

// The tiles that at least one of rows first .. last sees, numbered by n0 / block_n and walked from
// the last to the first; none if last < first.
struct TileRange {
  int begin, end;

  __device__ __forceinline__ TileRange(const tile::Mask& mask, int first_row, int last_row,
                                       int block_n) {
    const tile::Range any = mask.any_row(first_row, last_row);
    const bool none = last_row < first_row || any.end <= any.begin;
    begin = none ? 0 : any.begin / block_n;
    end = none ? 0 : (any.end + block_n - 1) / block_n;
  }
};

// Of a consumer's tiles: those that all its rows see whole, and after whose predecessors in the
// walk every row has met a key. The others, the first of the walk among them, are edge tiles.
struct FullTiles {
  int begin, end;

  __device__ __forceinline__ FullTiles(const tile::Mask& mask, const TileRange& tiles,
                                       int first_row, int last_row, int block_n) {
    const tile::Range every = mask.every_row(first_row, last_row);
    end = max(min((every.end - 1) / block_n, tiles.end - 1), tiles.begin);
    begin = min(max((every.begin + block_n - 1) / block_n, tiles.begin), end);
  }
};

// Whether at least one of a warp's 16 rows sees one of the keys from n0 on.
__device__ __forceinline__ bool sees_any(const tile::Mask& mask, int warp_row, int seqlen_q, int n0,
                                         int keys) {
  const tile::Range any = mask.any_row(warp_row, min(warp_row + 16, seqlen_q) - 1);
  return any.begin < min(any.end, n0 + keys) && any.end > n0;
}

// Scores of keys that their rows do not see become -inf. `first_row` is the
// consumer's, `n0` the tile's first key.
template <int kScores>
__device__ __forceinline__ void apply_mask(float (&acc_s)[kScores], const tile::Mask& mask,
                                           int first_row, int n0) {
  const Place place;
  const int row = first_row + place.warp * 16 + place.lane / 4;  // this lane's first
  const int first_key = n0 + place.lane % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // Counted from this lane's first key: the rest are constants.
    const tile::Range visible = mask.row(row + 8 * h, first_key);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!tile::contains(visible, 8 * j + e)) acc_s[4 * j + 2 * h + e] = -INFINITY;
      }
    }
  }
}

}  // namespace dlattn::sm90
