#pragma once

#include "cuda/tile/accumulator_flush.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma {

// Sets the accumulators of a warp's rows aside in the rows of out, or takes them back from there
// (tile/accumulator_flush.cuh). `first_row`: the warp's first row, counted from the head's first.
template <typename T>
struct AccumulatorFlush {
  const AttentionParams& params;
  const tile::ResultRows<T> result;
  const int first_row;
  const int lane;

  template <int kRowTiles, int kGroups>
  __device__ __forceinline__ void store(float (&acc_o)[kRowTiles][kGroups][4]) const {
    move(acc_o, [](float* pair, T* out) { tile::flush(pair, out); });
  }
  template <int kRowTiles, int kGroups>
  __device__ __forceinline__ void restore(float (&acc_o)[kRowTiles][kGroups][4]) const {
    move(acc_o, [](float* pair, const T* out) { tile::restore(pair, out); });
    __syncwarp();  // other lanes may store results there
  }

 private:
  template <int kRowTiles, int kGroups, typename Move>
  __device__ __forceinline__ void move(float (&acc_o)[kRowTiles][kGroups][4], Move move) const {
    const int column = lane % 4 * 2;
    T* out[2 * kRowTiles];
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      out[r] = row < result.seqlen_q ? result.out + row * params.out.row_stride + column : nullptr;
    }
    tile::move_quad_rows<kGroups * 8>(
        out, static_cast<int>(params.head_dim_v) - column,
        [&](int r, int j) { return acc_o[r / 2][j] + r % 2 * 2; }, move);
  }
};

}  // namespace dlattn::wmma
