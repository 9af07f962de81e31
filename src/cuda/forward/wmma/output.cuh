#pragma once

#include <cstdint>

#include "cuda/tile/mma/softmax.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/swizzle.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::wmma {

// Normalises the warp's rows and leaves them in `sO`, the warp's own swizzled rows.
template <typename T, int kHeadDim, int kRowTiles>
__device__ __forceinline__ void stage_output(const float (&acc_o)[kRowTiles][kHeadDim / 8][4],
                                             const float (&scales)[kRowTiles][2], unsigned char* sO,
                                             int lane) {
  using Rows = tile::SwizzledRows<kHeadDim>;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = scales[m][h];
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const float low = tile::scaled(acc_o[m][j][2 * h], scale);
        const float high = tile::scaled(acc_o[m][j][2 * h + 1], scale);
        unsigned char* to = sO + Rows::offset(16 * m + 8 * h + lane / 4, j) + lane % 4 * 4;
        *reinterpret_cast<std::uint32_t*>(to) = tile::pack<T>(low, high);
      }
    }
  }
  __syncwarp();
}

// Stores them, the first `num_rows`; row_address(row) is where one begins. `columns` is a multiple
// of 8 unless kAnyColumns.
template <typename T, int kHeadDim, bool kAnyColumns, int kRowTiles, typename RowAddress>
__device__ __forceinline__ void store_rows(RowAddress row_address, int num_rows,
                                           const unsigned char* sO, int columns, int store_bytes,
                                           int lane) {
  using Rows = tile::SwizzledRows<kHeadDim>;
  constexpr int kChunksOfRow = kHeadDim / 8;
#pragma unroll 4
  for (int i = lane; i < kRowTiles * 16 * kChunksOfRow; i += 32) {
    const int row = i / kChunksOfRow, chunk = i % kChunksOfRow;
    if (row >= num_rows || chunk * 8 >= columns) continue;
    using Chunk = tile::Vec<T, 8>;
    const Chunk x = *reinterpret_cast<const Chunk*>(sO + Rows::offset(row, chunk));
    T* to = row_address(row) + chunk * 8;
    if (store_bytes == 16 && (!kAnyColumns || chunk * 8 + 8 <= columns)) {
      *reinterpret_cast<Chunk*>(to) = x;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (!kAnyColumns || chunk * 8 + e < columns) to[e] = x.x[e];
      }
    }
  }
}

// The results of a warp's rows, row `first_row` of the work tile's head the first of them: lse and
// out. `sO`, the warp's own rows of shared memory, is where its rows of Q stood; K and V of all
// warps as well if kOverlaid.
template <int kHeadDim, bool kAnyColumns, bool kOverlaid, int kRowTiles, typename T, bool kPacked>
__device__ __forceinline__ void write_results(
    const AttentionParams& params, const LaunchShape& shape, const tile::ResultRows<T>& result,
    const tile::Rows<kPacked>& rows, int first_row,
    const tile::mma::SpeculativeSoftmax<kRowTiles>& softmax, float scale_log2,
    const float (&acc_o)[kRowTiles][kHeadDim / 8][4], unsigned char* sO, int lane) {
  const int num_rows = rows.count(result.seqlen_q);
  float scales[kRowTiles][2];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + lane / 4 + 16 * m + 8 * h;
      const float* sink = result.sink;
      if (kPacked && sink) sink += rows.head(row) * params.sinks.head_stride;
      const tile::RowResult row_result = softmax.finalize(m, h, scale_log2, sink);
      if (result.lse && lane % 4 == 0 && row < num_rows)
        result.lse[rows.offset(row, 1, params.lse.head_stride)] = row_result.lse;
      scales[m][h] = row_result.scale;
    }
  }
  if constexpr (kOverlaid) {
    __syncthreads();  // no warp reads K or V any more
  } else {
    __syncwarp();  // nor this one its rows of Q
  }
  stage_output<T, kHeadDim>(acc_o, scales, sO, lane);
  T* out = result.out + (kPacked ? 0 : first_row * params.out.row_stride);
  const auto row_address = [&](int row) {
    if constexpr (!kPacked) return out + row * params.out.row_stride;
    return out + rows.offset(first_row + row, params.out.row_stride, params.out.head_stride);
  };
  store_rows<T, kHeadDim, kAnyColumns, kRowTiles>(row_address, num_rows - first_row, sO,
                                                  static_cast<int>(params.head_dim_v),
                                                  shape.store_bytes, lane);
}

}  // namespace dlattn::wmma
