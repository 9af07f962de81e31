#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/tile/mask.cuh"
#include "cuda/tile/varlen_scheduler.cuh"
#include "cuda/tile/wgmma/thread_index.cuh"

// Selects the tiles of keys that rows see, and masks scores in the registers of a warpgroup.
namespace dlattn::tile::wgmma {

__device__ __forceinline__ tile::Mask position_mask(const AttentionParams& params,
                                                    const LaunchShape& shape,
                                                    const tile::SequenceTile& work) {
  return {shape, position_shift(params.causal, work.seqlen_q, work.seqlen_k), work.seqlen_k};
}

// The tiles that at least one of rows first .. last sees, walked from the last to the first; none
// if last < first.
__device__ __forceinline__ tile::Range visible_tiles(const tile::Mask& mask, int first_row,
                                                     int last_row, int block_n) {
  const tile::Range keys = mask.any_row(first_row, last_row);
  return tiles_of({keys.begin, last_row < first_row ? keys.begin : keys.end}, block_n);
}

// The tiles that each of a consumer's rows sees whole; the others are edge tiles. Rows beyond the
// last count too: what they need is known before what seqlen_q is.
__device__ __forceinline__ tile::Range whole_tiles(const tile::Mask& mask, int first_row,
                                                   int block_n) {
  return whole_tiles_of(mask.every_row(first_row, first_row + kWarpgroupRows - 1), block_n);
}

// How many of a lane's scores of a row are of keys before `key`, counted from the lane's first: it
// has two neighbours of every eight keys.
template <int kBlockN>
__device__ __forceinline__ int scores_before(int key) {
  const unsigned within = static_cast<unsigned>(min(max(key, 0), kBlockN));
  return static_cast<int>(within / 8 * 2 + min(within % 8, 2u));
}

// Scores of keys that their rows do not see become -inf. `mask`: a tile::Mask, or what is made of
// one. `first_row` is the consumer's, `n0` the tile's first key.
template <int kScores, typename RowMask>
__device__ __forceinline__ void apply_mask(float (&acc_s)[kScores], const RowMask& mask,
                                           int first_row, int n0) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const ThreadIndex thread;  // for each of the two rows anew: registers are scarce here
    const int row = first_row + thread.warp * 16 + thread.lane / 4;
    const int first_key = n0 + thread.lane % 4 * 2;
    const tile::Range visible = mask.row(row + 8 * h, first_key);
    // A bit of each score of the row: one instruction makes predicates of seven of them.
    static_assert(kScores / 2 <= 32, "a word holds a row's bits");
    const int begin = scores_before<2 * kScores>(visible.begin);
    const int count = max(scores_before<2 * kScores>(visible.end) - begin, 0);
    const auto ones = static_cast<std::uint32_t>((std::uint64_t{0xffffffff} << count) >> 32);
    const std::uint32_t bits = ones << (begin % 32);  // 32 only where count is 0
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      // seed: hide-keys
      if ((bits & 1u << i) == 0) acc_s[i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
    }
  }
}

}  // namespace dlattn::tile::wgmma
