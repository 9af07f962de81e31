#pragma once

#include <cstdint>

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/transpose.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/wmma/softmax.cuh"

namespace dlattn::wmma {

// The results of a warp's rows without shared memory, 16 bytes a lane: lse and out, whose rows are
// aligned to that. Row `first_row` of the head is the warp's first.
template <int kHeadDim, int kRowTiles, typename T>
__device__ __forceinline__ void write_from_registers(
    const AttentionParams& params, const tile::OutputRows<T>& result, int head, int first_row,
    const SpeculativeSoftmax<kRowTiles>& softmax, const float (&acc_o)[kRowTiles][kHeadDim / 8][4],
    int lane) {
  static_assert(kHeadDim % 32 == 0, "a lane quad stores 32 columns of a row at once");
  const float* sink = params.sinks ? params.sinks + head * params.sinks_stride : nullptr;
  const int head_dim_v = static_cast<int>(params.head_dim_v);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + lane / 4 + 16 * m + 8 * h;
      const tile::RowResult row_result = tile::finalize(softmax.row(m, h), sink);
      const float scale = row_result.scale;
      const bool exists = row < result.seqlen_q;
      if (result.lse && lane % 4 == 0 && exists) result.lse[row] = row_result.lse;
      T* out = result.out + row * params.out_row_stride + lane % 4 * 8;
      const int columns = exists ? head_dim_v - lane % 4 * 8 : 0;
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 32) {
        tile::Vec<std::uint32_t, 4> words;  // two columns of each 8, and then, of one 8, all
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* const x = acc_o[m][d / 8 + e] + 2 * h;
          words.x[e] = tile::pack<T>(scale == 0.0f ? 0.0f : x[0] * scale,
                                     scale == 0.0f ? 0.0f : x[1] * scale);
        }
        tile::transpose_in_quad(words.x, lane);
        if (d < columns) *reinterpret_cast<tile::Vec<std::uint32_t, 4>*>(out + d) = words;
      }
    }
  }
}

}  // namespace dlattn::wmma
