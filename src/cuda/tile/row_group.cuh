#pragma once

#include "cuda/ptx/wmma.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

// The row group of a warp in the kernels that use nvcuda::wmma: 16 query rows, and the rows of sS,
// in shared memory, that hold their scores. Fragment layouts are opaque, so scores pass through sS.
// Two lanes share a row: lane 2r + h has row r, and every other group of four keys, from 4h on.
// Neighbouring groups of one row and the rows of a quarter warp then lie in different banks.
namespace dlattn::tile {

namespace wmma = nvcuda::wmma;

constexpr int kRowGroupRows = 16;

template <typename T>
using FragmentA = wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major>;
template <typename T>
using FragmentBCol = wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major>;
template <typename T>
using FragmentBRow = wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major>;
using FragmentC = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;

// The row of a lane in its warp's row group.
__device__ __forceinline__ int lane_row(int lane) {
  return lane / 2;
}
// The first key of a lane's i-th group of four.
__device__ __forceinline__ int lane_column(int lane, int i) {
  return (2 * i + lane % 2) * 4;
}

// sS[16][kKeys] = Q K^T for the warp's rows. K is stored key by key, so K^T is a column-major
// operand. Its leading dimension, from column to column, is that of sK's padded rows.
template <int kKeys, int kHeadDim, int kLd, int kScoreLd, typename T>
__device__ __forceinline__ void row_group_scores(float* sS, const FragmentA<T> (&rQ)[kHeadDim / 16],
                                                 const T* sK) {
#pragma unroll
  for (int n = 0; n < kKeys; n += 16) {
    FragmentC acc_s;
    wmma::fill_fragment(acc_s, 0.0f);
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      FragmentBCol<T> rK;
      // seed: load-k
      ptx::load_matrix(rK, sK + n * kLd + d, kLd);
      wmma::mma_sync(acc_s, rQ[d / 16], rK, acc_s);
    }
    wmma::store_matrix_sync(sS + n, acc_s, kScoreLd, wmma::mem_row_major);
  }
  __syncwarp();
}

// This lane's scores of its row, as products q.k, -inf where the row does not see the key. `n0` is
// the tile's first key.
template <int kGroups>
__device__ __forceinline__ void load_scores(float (&x)[kGroups][4], const float* row_scores,
                                            int lane, const Range& visible, int n0) {
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    load(x[i], row_scores + lane_column(lane, i));
  }
  // Few tiles need it, so a warp decides as one.
  if (!__any_sync(kFullMask, !contains_all(visible, n0, 8 * kGroups))) return;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // seed: hide-keys
      if (!contains(visible, n0 + lane_column(lane, i) + e)) x[i][e] = -INFINITY;
    }
  }
}

// Turns scores into probabilities, in place. `softmax` is the row's, with this lane's part of the
// sum. Returns the factor that the row's accumulators must be multiplied with.
template <int kGroups>
__device__ __forceinline__ float row_group_softmax(OnlineSoftmax& softmax, float (&x)[kGroups][4],
                                                   float scale_log2) {
  float tile_max = -INFINITY;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) tile_max = fmaxf(tile_max, x[i][e]);
  }
  // seed: row-max
  const float factor = softmax.raise_max(reduce_max<2>(tile_max), scale_log2);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // seed: probability
      x[i][e] = softmax.probability(x[i][e], scale_log2);
      softmax.row_sum += x[i][e];
    }
  }
  return factor;
}

}  // namespace dlattn::tile
