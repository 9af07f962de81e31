#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/tile/mask.cuh"
#include "cuda/tile/row_max.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::wmma8 {

// Stores a lane's accumulators of a row, 4 neighbouring columns of every 16, times `scale`. `out`:
// this lane's first column, from which on `columns` of the row exist; kWhole: where there is one of
// the 4, there are all.
template <bool kWhole, typename Out, int kChunks>
__device__ __forceinline__ void store_row(Out* out, const float (&acc_o)[kChunks][2][4], int h,
                                          float scale, int columns, bool aligned) {
#pragma unroll
  for (int d = 0; d < kChunks; ++d) {
    if (16 * d >= columns) continue;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = tile::scaled(acc_o[d][h][e], scale);
    if (aligned && (kWhole || 16 * d + 4 <= columns)) {
      tile::store(out + 16 * d, x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (kWhole || 16 * d + e < columns) out[16 * d + e] = tile::from_float<Out>(x[e]);
      }
    }
  }
}

// The results of a warp's rows, the head's from `first_row` on: lse, and out as elements of Out.
// results(softmax, row, exists, sees_any, sink) is what becomes of a row: its lse, and the factor
// of its accumulators.
template <typename Out, bool kWhole, typename Rows, typename Results>
__device__ __forceinline__ void write_results(const AttentionParams& params,
                                              const LaunchShape& shape, const tile::WorkTile& work,
                                              const tile::Mask& mask, int first_row, Rows& rows,
                                              int lane, const Results& results) {
  const tile::ResultRows<Out> result(params, work);
  const bool aligned = shape.store_bytes >= 4 * static_cast<int>(sizeof(Out));
#pragma unroll
  for (int m = 0; m < Rows::kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + lane / 4 + 16 * m + 8 * h;
      const tile::Range visible = mask.row(row);
      // seed: stored-rows
      const bool exists = row < result.seqlen_q;
      const tile::RowResult row_result =
          results(rows.softmax[m][h], row, exists, visible.begin < visible.end, result.sink);
      if (result.lse && lane % 4 == 0 && exists) result.lse[row] = row_result.lse;
      const int column = lane % 4 * 4;
      store_row<kWhole>(
          result.out + row * params.out.row_stride + column, rows.acc_o[m], h, row_result.scale,
          exists ? static_cast<int>(params.head_dim_v) - (kWhole ? 0 : column) : 0, aligned);
    }
  }
}

}  // namespace dlattn::wmma8
