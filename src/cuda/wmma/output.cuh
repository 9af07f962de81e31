#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/swizzle.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"
#include "cuda/wmma/softmax.cuh"

namespace dlattn::wmma {

// Normalises the warp's rows and stores them, by way of `sO`, the warp's own swizzled rows.
template <int kHeadDim, int kRowTiles, typename T>
__device__ __forceinline__ void store_output(T* out, std::int64_t row_stride, int num_rows,
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
    T* to = out + row * row_stride + chunk * 8;
    if (store_bytes == 16 && chunk * 8 + 8 <= columns) {
      *reinterpret_cast<Chunk*>(to) = x;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (chunk * 8 + e < columns) to[e] = x.x[e];
      }
    }
  }
}

// The 4 x 4 transposition of a lane quad's words: word j of lane t becomes word t of lane j.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & step) continue;
      const std::uint32_t received =
          __shfl_xor_sync(tile::kFullMask, upper ? x[j] : x[j + step], step);
      if (upper) {
        x[j] = received;
      } else {
        x[j + step] = received;
      }
    }
  }
}

// Normalises the warp's rows and stores them straight from registers. Of every 32 columns each lane
// of a quad has two of every 8, which are handed around so that each stores 8 neighbours. `columns`
// is a multiple of 8.
template <int kHeadDim, int kRowTiles, typename T>
__device__ __forceinline__ void store_from_registers(
    T* out, std::int64_t row_stride, int num_rows, const float (&acc_o)[kRowTiles][kHeadDim / 8][4],
    const float (&scales)[kRowTiles][2], int columns, int store_bytes, int lane) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = scales[m][h];
      const int row = 16 * m + 8 * h + lane / 4;
#pragma unroll
      for (int first = 0; first < kHeadDim; first += 32) {
        std::uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float (&acc)[4] = acc_o[m][first / 8 + j];
          const float low = scale == 0.0f ? 0.0f : acc[2 * h] * scale;
          const float high = scale == 0.0f ? 0.0f : acc[2 * h + 1] * scale;
          words[j] = tile::pack<T>(low, high);
        }
        transpose_quad(words, lane);
        const int column = first + lane % 4 * 8;
        if (row >= num_rows || column >= columns) continue;
        T* to = out + row * row_stride + column;
        tile::Vec<T, 8> chunk;
        memcpy(&chunk, words, sizeof words);
        if (store_bytes == 16) {
          *reinterpret_cast<tile::Vec<T, 8>*>(to) = chunk;
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e) to[e] = chunk.x[e];
        }
      }
    }
  }
}

// What is left to do for a warp's rows, row `first_row` of the sequence the first of them: stores
// lse and gives the factors that normalise out.
template <int kRowTiles, typename T>
__device__ __forceinline__ void finish_rows(const AttentionParams& params,
                                            const tile::OutputRows<T>& result, int head,
                                            int first_row,
                                            const SpeculativeSoftmax<kRowTiles>& softmax,
                                            float (&scales)[kRowTiles][2], int lane) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const tile::RowResult row_result = tile::finalize(
          softmax.row(m, h), params.sinks ? params.sinks + head * params.sinks_stride : nullptr);
      const int row = first_row + lane / 4 + 16 * m + 8 * h;
      if (result.lse && lane % 4 == 0 && row < result.seqlen_q) result.lse[row] = row_result.lse;
      scales[m][h] = row_result.scale;
    }
  }
}

// The results of a warp's rows: lse and out.
template <int kHeadDim, int kRowTiles, typename T>
__device__ __forceinline__ void write_results(
    const AttentionParams& params, const LaunchShape& shape, const tile::OutputRows<T>& result,
    int head, int first_row, const SpeculativeSoftmax<kRowTiles>& softmax,
    const float (&acc_o)[kRowTiles][kHeadDim / 8][4], int lane) {
  float scales[kRowTiles][2];
  finish_rows(params, result, head, first_row, softmax, scales, lane);
  store_from_registers<kHeadDim>(result.out + first_row * params.out_row_stride,
                                 params.out_row_stride, result.seqlen_q - first_row, acc_o, scales,
                                 static_cast<int>(params.head_dim_v), shape.store_bytes, lane);
}

// The same for any number of columns, by way of `sO`, the warp's own rows of shared memory, where
// its rows of Q stood; K and V of all warps as well if kOverlaid.
template <int kHeadDim, bool kOverlaid, int kRowTiles, typename T>
__device__ __forceinline__ void write_results_through(
    unsigned char* sO, const AttentionParams& params, const LaunchShape& shape,
    const tile::OutputRows<T>& result, int head, int first_row,
    const SpeculativeSoftmax<kRowTiles>& softmax, const float (&acc_o)[kRowTiles][kHeadDim / 8][4],
    int lane) {
  float scales[kRowTiles][2];
  finish_rows(params, result, head, first_row, softmax, scales, lane);
  if constexpr (kOverlaid) {
    __syncthreads();  // no warp reads K or V any more
  } else {
    __syncwarp();  // nor this one its rows of Q
  }
  store_output<kHeadDim>(result.out + first_row * params.out_row_stride, params.out_row_stride,
                         result.seqlen_q - first_row, acc_o, scales, sO,
                         static_cast<int>(params.head_dim_v), shape.store_bytes, lane);
}

}  // namespace dlattn::wmma
