#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/tile/accumulator_flush.cuh"
#include "cuda/tile/mma/products.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/quad_rows.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::wmma_halves {

// The rows of out that a lane has of its warp's 16, 8 apart, from its warp's first column on.
template <typename T>
struct OutRows {
  T* rows[2];   // null: there is no such row
  int columns;  // how many exist from there on; may be none or less

  __device__ __forceinline__ OutRows(const AttentionParams& p, const tile::ResultRows<T>& result,
                                     int first_row, int first_column, int lane)
      : columns(static_cast<int>(p.head_dim_v) - first_column) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + lane / 4 + 8 * h;
      rows[h] =
          row < result.seqlen_q ? result.out + row * p.out.row_stride + first_column : nullptr;
    }
  }
};

// A warp's 16 query rows, of which it has kColumns columns: Q, the softmax of each row and the
// unnormalised output. The other warp of its pair has the same softmax, to the last bit.
template <typename T, int kColumns>
struct WarpRows {
  const int lane;
  float acc_o[1][kColumns / 8][4] = {};
  std::uint32_t rQ[kColumns / 16][1][4];
  tile::OnlineSoftmax softmax[2];  // of rows lane / 4 and lane / 4 + 8; row_sum: this lane's part
  bool is_flushed = false;         // whether accumulators are set aside (accumulator_flush.cuh)

  __device__ __forceinline__ explicit WarpRows(int lane) : lane(lane) {}

  // `sQ`: the warp's rows in shared memory.
  __device__ __forceinline__ void load_queries(ptx::SmemAddress sQ) {
    const ptx::SmemAddress lane_q = sQ + tile::mma::lane_offset_down<kColumns>(lane);
#pragma unroll
    for (int d = 0; d < kColumns; d += 16) tile::mma::load_q<kColumns>(rQ[d / 16], lane_q, d);
  }

  // The part of S that these columns give.
  template <int kGroups>
  __device__ __forceinline__ void multiply_keys(float (&acc_s)[1][kGroups][4],
                                                ptx::SmemAddress sK) const {
    tile::mma::multiply_qk<T, kColumns, 0, kGroups * 8>(
        acc_s, sK + tile::mma::lane_offset_across<kColumns>(lane),
        [this](std::uint32_t (&a)[1][4], int d) { memcpy(a, rQ[d / 16], sizeof a); });
  }

  // Turns the scores of a tile into probabilities and adds their products with V. out_rows(): the
  // lane's OutRows, for accumulators that have been set aside.
  template <int kGroups, typename GetOutRows>
  __device__ __forceinline__ void attend(float (&acc_s)[1][kGroups][4], float scale_log2,
                                         ptx::SmemAddress sV, GetOutRows out_rows) {
    float factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) factors[h] = make_probabilities(acc_s[0], h, scale_log2);
    if (__any_sync(tile::kFullMask, factors[0] != 1.0f || factors[1] != 1.0f)) {
      if (__builtin_expect(is_flushed, 0)) restore(out_rows());
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        // seed: rescale-output
        for (int e = 0; e < 4; ++e) acc_o[0][j][e] *= factors[e / 2];
      }
    }
    std::uint32_t rP[1][kGroups / 2][4];
    tile::mma::SpeculativeSoftmax<1>::pack<T, 0, kGroups * 8>(acc_s, rP);
    tile::mma::multiply_pv<T, kColumns, 0, kGroups * 8>(
        acc_o, rP, sV + tile::mma::lane_offset_down<kColumns>(lane));
  }

  __device__ __forceinline__ void flush(const OutRows<T>& to) {
    move(to, [](float* pair, T* out) { tile::flush(pair, out); });
    is_flushed = true;
  }
  __device__ __forceinline__ void restore(const OutRows<T>& from) {
    move(from, [](float* pair, const T* out) { tile::restore(pair, out); });
    __syncwarp();  // other lanes may store results there
    is_flushed = false;
  }

  // A row's lse and what its accumulators are multiplied with. All lanes call it.
  __device__ __forceinline__ tile::RowResult finalize(int h, float scale_log2, const float* sink) {
    // seed: row-sum
    softmax[h].row_sum = tile::reduce_sum<4>(softmax[h].row_sum);
    return softmax[h].finalize(scale_log2, sink);
  }

  // Stores row h, normalised by `scale`, 16 bytes at a time if `wide`. All lanes call it.
  __device__ __forceinline__ void store(const OutRows<T>& to, int h, float scale, bool wide) const {
    const int columns = to.rows[h] ? to.columns : 0;
    if (wide) {
      const int column = lane % 4 * 8;
      T* const out = to.rows[h] ? to.rows[h] + column : nullptr;
      tile::store_quad_row<T, kColumns>(out, columns - column, scale, lane,
                                        [&](int j) { return acc_o[0][j] + 2 * h; });
      return;
    }
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * j + lane % 4 * 2 + e;
        if (column < columns)
          to.rows[h][column] = tile::from_float<T>(tile::scaled(acc_o[0][j][2 * h + e], scale));
      }
    }
  }

 private:
  // Returns the factor that the row's accumulators must be multiplied with.
  template <int kGroups>
  __device__ __forceinline__ float make_probabilities(float (&x)[kGroups][4], int h,
                                                      float scale_log2) {
    float tile_max = -INFINITY;
#pragma unroll
    for (int j = 0; j < kGroups; ++j)
      tile_max = fmaxf(tile_max, fmaxf(x[j][2 * h], x[j][2 * h + 1]));
    const float factor = softmax[h].raise_max(tile::reduce_max<4>(tile_max), scale_log2);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; ++e) {
        x[j][e] = softmax[h].probability(x[j][e], scale_log2);
        softmax[h].row_sum += x[j][e];
      }
    }
    return factor;
  }

  template <typename Move>
  __device__ __forceinline__ void move(const OutRows<T>& rows, Move move) {
    const int column = lane % 4 * 2;
    T* const out[2] = {rows.rows[0] ? rows.rows[0] + column : nullptr,
                       rows.rows[1] ? rows.rows[1] + column : nullptr};
    tile::move_quad_rows<kColumns>(
        out, rows.columns - column, [&](int h, int j) { return acc_o[0][j] + 2 * h; }, move);
  }
};

}  // namespace dlattn::wmma_halves
