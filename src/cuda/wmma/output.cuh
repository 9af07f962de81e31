#pragma once

#include <cstdint>

#include "cuda/tile/swizzle.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::wmma {

// Normalises the warp's rows and stores them, by way of `sO`, the warp's own swizzled rows.
// row_address(row) is where one of them begins, the first `num_rows` of which exist. `columns` is a
// multiple of 8 unless kAnyColumns.
template <typename T, int kHeadDim, bool kAnyColumns, int kRowTiles, typename RowAddress>
__device__ __forceinline__ void store_output(RowAddress row_address, int num_rows,
                                             const float (&acc_o)[kRowTiles][kHeadDim / 8][4],
                                             const float (&scales)[kRowTiles][2], unsigned char* sO,
                                             int columns, int store_bytes, int lane) {
  using Rows = tile::SwizzledRows<kHeadDim>;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = scales[m][h];
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const float low = scale == 0.0f ? 0.0f : acc_o[m][j][2 * h] * scale;
        const float high = scale == 0.0f ? 0.0f : acc_o[m][j][2 * h + 1] * scale;
        unsigned char* to = sO + Rows::offset(16 * m + 8 * h + lane / 4, j) + lane % 4 * 4;
        *reinterpret_cast<std::uint32_t*>(to) = tile::pack<T>(low, high);
      }
    }
  }
  __syncwarp();
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

}  // namespace dlattn::wmma
