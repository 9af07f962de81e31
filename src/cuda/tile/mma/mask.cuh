#pragma once

#include <cmath>

#include "cuda/tile/mask.cuh"

namespace dlattn::tile::mma {

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

}  // namespace dlattn::tile::mma
