#pragma once

#include "cuda/tile/mma/softmax.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/quad_rows.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma {

// The results of a warp's rows without shared memory, 16 bytes a lane: lse and out, whose rows are
// aligned to that. Row `first_row` of the head is the warp's first.
template <int kHeadDim, int kRowTiles, typename T>
__device__ __forceinline__ void write_from_registers(
    const AttentionParams& params, const tile::ResultRows<T>& result, int first_row,
    const tile::mma::SpeculativeSoftmax<kRowTiles>& softmax, float scale_log2,
    const float (&acc_o)[kRowTiles][kHeadDim / 8][4], int lane) {
  const int head_dim_v = static_cast<int>(params.head_dim_v);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + lane / 4 + 16 * m + 8 * h;
      const tile::RowResult row_result = softmax.finalize(m, h, scale_log2, result.sink);
      const bool exists = row < result.seqlen_q;
      if (result.lse && lane % 4 == 0 && exists) result.lse[row] = row_result.lse;
      T* out = result.out + row * params.out.row_stride + lane % 4 * 8;
      const int columns = exists ? head_dim_v - lane % 4 * 8 : 0;
      tile::store_quad_row<T, kHeadDim>(out, columns, row_result.scale, lane,
                                        [&](int j) { return acc_o[m][j] + 2 * h; });
    }
  }
}

}  // namespace dlattn::wmma
