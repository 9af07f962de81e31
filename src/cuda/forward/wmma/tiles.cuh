#pragma once

#include <cmath>
#include <utility>

#include "cuda/tile/mask.cuh"

// Which tiles of keys a block walks, and which keys of them its rows see.
namespace dlattn::wmma {

// Sets scores of keys that their rows do not see to -inf. `first_row` is this lane's first.
template <int kRowTiles, int kGroups, typename Mask>
__device__ __forceinline__ void apply_mask(float (&acc_s)[kRowTiles][kGroups][4], const Mask& mask,
                                           int first_row, int n0, int lane) {
  const int first_key = n0 + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Keys are counted from this lane's first, so that they are constants below, and no register
      // is needed from tile to tile.
      const tile::Range visible = mask.row(first_row + 16 * m + 8 * h, first_key);
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (!tile::contains(visible, 8 * j + e)) acc_s[m][j][2 * h + e] = -INFINITY;
        }
      }
    }
  }
}

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
// first tile of the walk, which gives the rows their first max.
struct TileRange {
  int begin, full_begin, full_end, end;

  template <typename Mask>
  __device__ __forceinline__ TileRange(const Mask& mask, int first_row, int last_row, int block_n) {
    const tile::Range any = tiles_of(mask.any_row(first_row, last_row), block_n);
    const tile::Range full = whole_tiles_of(mask.every_row(first_row, last_row), block_n);
    begin = any.begin;
    end = any.end;
    full_end = max(min(full.end, end - 1), begin);
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
