#pragma once

#include <cstdint>

#include "cuda/ptx/elements.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/row_max.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::wmma8 {

// How numbers become elements of out: of a dtype that is known when this is compiled, or of one of
// 16 bits that is asked for as late as can be, so that all code before is there once.
template <typename Out>
struct KnownElements {
  using Element = Out;
  __device__ __forceinline__ static void store(Out* out, const float (&x)[4]) {
    tile::store(out, x);
  }
  __device__ __forceinline__ static Out of(float x) { return tile::from_float<Out>(x); }
};
struct Elements16 {
  using Element = std::uint16_t;
  bool is_half;  // else bfloat16

  __device__ __forceinline__ void store(std::uint16_t* out, const float (&x)[4]) const {
    const tile::Vec<std::uint32_t, 2> pairs = {{pair(x[0], x[1]), pair(x[2], x[3])}};
    *reinterpret_cast<tile::Vec<std::uint32_t, 2>*>(out) = pairs;
  }
  __device__ __forceinline__ std::uint16_t of(float x) const {
    return static_cast<std::uint16_t>(pair(x, 0.0f));
  }

 private:
  __device__ __forceinline__ std::uint32_t pair(float low, float high) const {
    return is_half ? tile::pack<half>(low, high) : tile::pack<__nv_bfloat16>(low, high);
  }
};

// Stores a lane's accumulators of a row, 4 neighbouring columns of every 16, times `scale`. `out`:
// this lane's first column, from which on `columns` of the row exist; kWhole: where there is one of
// the 4, there are all.
template <bool kWhole, typename Elements, int kChunks>
__device__ __forceinline__ void store_row(typename Elements::Element* out, Elements elements,
                                          const float (&acc_o)[kChunks][2][4], int h, float scale,
                                          int columns, bool aligned) {
#pragma unroll
  for (int d = 0; d < kChunks; ++d) {
    if (16 * d >= columns) continue;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = tile::scaled(acc_o[d][h][e], scale);
    if (aligned && (kWhole || 16 * d + 4 <= columns)) {
      elements.store(out + 16 * d, x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (kWhole || 16 * d + e < columns) out[16 * d + e] = elements.of(x[e]);
      }
    }
  }
}

// The results of a warp's rows, the head's from `first_row` on: lse, and out. results(softmax, row,
// exists, sees_any, sink) is what becomes of a row: its lse, and the factor of its accumulators.
template <bool kWhole, typename Elements, typename Rows, typename Results>
__device__ __forceinline__ void write_results(const AttentionParams& params,
                                              const LaunchShape& shape, const tile::WorkTile& work,
                                              const tile::Mask& mask, int first_row, Rows& rows,
                                              int lane, const Results& results, Elements elements) {
  using Out = typename Elements::Element;
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
      store_row<kWhole>(result.out + row * params.out.row_stride + column, elements, rows.acc_o[m],
                        h, row_result.scale,
                        exists ? static_cast<int>(params.head_dim_v) - (kWhole ? 0 : column) : 0,
                        aligned);
    }
  }
}

}  // namespace dlattn::wmma8
