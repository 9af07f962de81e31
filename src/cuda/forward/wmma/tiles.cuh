#pragma once

#include <cmath>
#include <utility>

#include "cuda/tile/mask.cuh"

// The tiles of keys that a block walks, and the slices that a warp computes of them.
namespace dlattn::wmma {

// Sets the scores of a tile's first `count` keys to -inf.
template <int kRowTiles, int kGroups>
__device__ __forceinline__ void hide_keys(float (&acc_s)[kRowTiles][kGroups][4], int count,
                                          int lane) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (8 * j + lane % 4 * 2 + i % 2 < count) acc_s[m][j][i] = -INFINITY;
      }
    }
  }
}

// The tiles of a block, numbered by n0 / block_n and walked from the last to the first: edge tiles
// from end - 1 down to full_end, then full tiles, of which every row sees every key, down to
// full_begin, then edge tiles down to begin. Edge tiles are those that may need a mask, and the
// first tile of the walk of which a row sees a key, which gives the rows their first max.
struct TileRange {
  int begin, full_begin, full_end, end;

  template <typename Mask>
  __device__ __forceinline__ TileRange(const Mask& mask, int first_row, int last_row, int block_n) {
    const tile::Range any = tiles_of(mask.any_row(first_row, last_row), block_n);
    const tile::Range full = whole_tiles_of(mask.every_row(first_row, last_row), block_n);
    begin = any.begin;
    end = any.end;
    set_full(full, end);
  }

  // The same tiles as a warp walks them that has only rows first_row .. last_row of the block's:
  // full tiles are those that are full for its rows. It sees nothing of tiles beyond its edges.
  template <typename Mask>
  __device__ __forceinline__ TileRange of_warp(const Mask& mask, int first_row, int last_row,
                                               int block_n) const {
    TileRange own = *this;
    const int seen_end = tiles_of(mask.any_row(first_row, last_row), block_n).end;
    own.set_full(whole_tiles_of(mask.every_row(first_row, last_row), block_n), min(seen_end, end));
    return own;
  }

 private:
  // `seen_end`: the tile after the first one of the walk of which a row sees a key.
  __device__ __forceinline__ void set_full(const tile::Range& full, int seen_end) {
    full_end = max(min(full.end, seen_end - 1), begin);
    full_begin = min(max(full.begin, begin), full_end);
  }
};

// Calls slice(integral_constant<int, 0>, go_on). go_on() calls the next of kCount slices in the
// same way. A slice that does not call go_on() is the last. In machine code that is one jump, and
// each slice's products overlap with what the next one computes.
template <int kCount, int kIndex = 0, typename Slice>
__device__ __forceinline__ void chain_slices(const Slice& slice) {
  if constexpr (kIndex < kCount) {
    slice(std::integral_constant<int, kIndex>{}, [&] { chain_slices<kCount, kIndex + 1>(slice); });
  }
}

// Calls slice(integral_constant<int, i>) for every i of the sequence.
template <typename Slice, int... kIndices>
__device__ __forceinline__ void for_each_slice(Slice slice,
                                               std::integer_sequence<int, kIndices...>) {
  (slice(std::integral_constant<int, kIndices>{}), ...);
}

}  // namespace dlattn::wmma
