#pragma once

#include "cuda/tile/vec.cuh"

// The output of a warp's 16 rows over some of their keys, unnormalised, in fp32: warps that divide
// the keys leave it in shared memory, where it is added up.
namespace dlattn::tile::mma {

// A lane's accumulators of a row in two neighbouring tiles of 8 columns. A part is an array of
// these for a whole warp, so that warps store and load 16 consecutive bytes a lane. A part of 16
// rows by kHeadDim columns is [row half h][pair of column tiles].
using PartPair = tile::Vec<float, 4>[32];

template <int kHeadDim>
constexpr int kPartPairs = kHeadDim / 16;  // of a row

// Stores the output of a warp's 16 rows.
template <int kHeadDim>
__device__ __forceinline__ void store_part(PartPair* part, const float (&acc_o)[kHeadDim / 8][4],
                                           int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < kPartPairs<kHeadDim>; ++i) {
      const float x[4] = {acc_o[2 * i][2 * h], acc_o[2 * i][2 * h + 1], acc_o[2 * i + 1][2 * h],
                          acc_o[2 * i + 1][2 * h + 1]};
      tile::store(part[h * kPartPairs<kHeadDim> + i][lane].x, x);
    }
  }
}

// Statistics of one row over one part of its keys: the max, base 2, that the output is relative to
// (-inf: the row saw nothing) and the sum of its probabilities. In shared memory those of all
// groups of warps stand side by side.
struct alignas(8) PartStats {
  float row_max;
  float row_sum;
};

}  // namespace dlattn::tile::mma
