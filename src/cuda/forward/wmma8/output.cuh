#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/forward/wmma8/warp_rows.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::wmma8 {

// Stores a lane's accumulators of a row, 4 neighbouring columns of every 16, times `scale`. `out`:
// this lane's first column. `columns` of the row exist, a multiple of 16.
template <typename Out, int kChunks>
__device__ __forceinline__ void store_row(Out* out, const float (&acc_o)[kChunks][2][4], int h,
                                          float scale, int columns, bool aligned) {
#pragma unroll
  for (int d = 0; d < kChunks; ++d) {
    if (16 * d >= columns) continue;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = tile::scaled(acc_o[d][h][e], scale);
    if (aligned) {
      tile::store(out + 16 * d, x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[16 * d + e] = tile::from_float<Out>(x[e]);
    }
  }
}

// The results of a warp's rows, the head's from `first_row` on: lse, and out as elements of Out.
// `scale`: of scores to base 2.
template <typename Out, int kHeadDim, bool kGeneral>
__device__ __forceinline__ void write_results(const AttentionParams& params,
                                              const LaunchShape& shape, const tile::WorkTile& work,
                                              const tile::Mask& mask, float scale, float v_descale,
                                              int first_row, WarpRows<kHeadDim, kGeneral>& rows,
                                              int lane) {
  const tile::ResultRows<Out> result(params, work);
  const bool aligned = shape.store_bytes >= 4 * static_cast<int>(sizeof(Out));
#pragma unroll
  for (int m = 0; m < rows.kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      constexpr float kUnit = 1.0f / (1 << kShift);  // of P, and so of row_sum and acc_o
      tile::OnlineSoftmax& softmax = rows.softmax[m][h];
      const int row = first_row + lane / 4 + 16 * m + 8 * h;
      // seed: row-sum
      softmax.row_sum = tile::reduce_sum<4>(softmax.row_sum) * kUnit;
      // A row that sees nothing has nothing of a scale that is NaN.
      const tile::Range visible = mask.row(row);
      if (visible.begin >= visible.end) softmax = {};
      const tile::RowResult row_result = softmax.finalize(scale, result.sink);
      // seed: stored-rows
      const bool exists = row < result.seqlen_q;
      if (result.lse && lane % 4 == 0 && exists) result.lse[row] = row_result.lse;
      // 0 where there is nothing to sum, whatever v's descale is.
      const float out_scale =
          row_result.scale == 0.0f ? 0.0f : row_result.scale * kUnit * v_descale;
      store_row(result.out + row * params.out.row_stride + lane % 4 * 4, rows.acc_o[m], h,
                out_scale, exists ? static_cast<int>(params.head_dim_v) : 0, aligned);
    }
  }
}

}  // namespace dlattn::wmma8
