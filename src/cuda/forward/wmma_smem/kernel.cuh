#pragma once

// Attention with both products on tensor cores through nvcuda::wmma; scores and probabilities pass
// through shared memory.
//
// A thread block of 4 warps computes 64 query rows of one head. A warp owns one row group, which
// has exactly 16 rows, from start to end; rows past the sequence's end are zero. Q and the
// unnormalised fp32 output stay in fragments. Per tile of 32 keys:
//   1. wait for K and V, one barrier, start the copy of the next tile into the other stage (where Q
//      was before the first tile);
//   2. S = Q K^T into the warp's rows of sS; softmax, two lanes a row; P overwrites S;
//   3. if a row's maximum has risen, O *= factors, loaded as a fragment; then O += P V.
// Shared memory: see SmemMap. The one barrier of a tile both publishes its K and V and frees the
// other stage. Within a warp: __syncwarp wherever lanes read or overwrite what other lanes wrote to
// or read from the warp's rows of sS.

#include <mma.h>  // before ptx/elements.cuh

#include "cuda/forward/wmma_smem/traits.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/tile/epilogue.cuh"
#include "cuda/tile/load.cuh"
#include "cuda/tile/row_group.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma_smem {

namespace wmma = nvcuda::wmma;

constexpr int kNumThreads = kNumWarps * 32;
constexpr int kRows = tile::kRowGroupRows;
constexpr int kGroups = kBlockN / 8;  // groups of four keys per lane

// Writes the factors of the rows of the output, each held by the row's two lanes. Which lane holds
// which element of a fragment is not specified, but it is the same for two accumulators. So the
// factors are stored as a 16 x 16 matrix with constant rows, over the scores that have just been
// read; rescale() loads it as an accumulator.
__device__ __forceinline__ void write_factors(float* sS, float factor, int lane) {
  const float factors[4] = {factor, factor, factor, factor};
  float* row = sS + tile::lane_row(lane) * kScoreLd;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    tile::store(row + kFactorColumn + tile::lane_column(lane, i), factors);
  }
}

template <int kFragments>
__device__ __forceinline__ void rescale(tile::FragmentC (&acc_o)[kFragments], const float* sS) {
  tile::FragmentC factors;
  wmma::load_matrix_sync(factors, sS + kFactorColumn, kScoreLd, wmma::mem_row_major);
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
#pragma unroll
    // seed: rescale-output
    for (int t = 0; t < factors.num_elements; ++t) acc_o[i].x[t] *= factors.x[t];
  }
}

// O += P V of the warp's rows.
template <int kHeadDim, typename T>
__device__ __forceinline__ void multiply_pv(tile::FragmentC (&acc_o)[kHeadDim / 16], const T* sP,
                                            const T* sV) {
  constexpr int kLd = row_elements(kHeadDim);
#pragma unroll 1  // unrolled, it loads fragments of V ahead into registers that are not there
  for (int n = 0; n < kBlockN; n += 16) {
    tile::FragmentA<T> rP;
    ptx::load_matrix(rP, sP + n, kProbLd);
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      tile::FragmentBRow<T> rV;
      ptx::load_matrix(rV, sV + n * kLd + d, kLd);
      wmma::mma_sync(acc_o[d / 16], rP, rV, acc_o[d / 16]);
    }
  }
}

// Stores the warp's rows, 32 columns at a time through its rows of sS; the lanes of a row
// normalise it.
template <int kHeadDim, typename T>
__device__ __forceinline__ void store_output(T* out_row, bool row_exists,
                                             const tile::FragmentC (&acc_o)[kHeadDim / 16],
                                             float* sS, float scale, int head_dim_v,
                                             int store_bytes, int lane) {
  const float* row = sS + tile::lane_row(lane) * kScoreLd;
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 32) {
    __syncwarp();  // the columns before have been read
    wmma::store_matrix_sync(sS, acc_o[d / 16], kScoreLd, wmma::mem_row_major);
    wmma::store_matrix_sync(sS + 16, acc_o[d / 16 + 1], kScoreLd, wmma::mem_row_major);
    __syncwarp();
    if (!row_exists) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = (2 * i + lane % 2) * 8;
      float x[8];
      tile::load(x, row + column);
      tile::store_columns(out_row, d + column, x, scale, head_dim_v, store_bytes);
    }
  }
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, kHeadDim <= 64 ? 4 : 3)
    kernel(const __grid_constant__ AttentionParams params,
           const __grid_constant__ LaunchShape shape) {
  constexpr int kLd = row_elements(kHeadDim);
  constexpr SmemMap kMap = smem_map(kHeadDim);
  constexpr int kStage = kMap.stage / static_cast<int>(sizeof(T));  // elements

  const tile::WorkTile work = tile::scheduled_tile(shape, blockIdx.x);
  ptx::wait_for_grids_ahead();
  const tile::Sequence<T> seq(params, shape, work);
  const int m0 = work.m_block * kBlockM;
  if (m0 >= seq.seqlen_q) return;

  const int lane_idx = threadIdx.x % 32;
  // seed: warp-rows
  const int warp_row = threadIdx.x / 32 * kRows;  // first row of this warp in the tile
  unsigned char* smem = ptx::dynamic_smem();
  T* sQ = reinterpret_cast<T*>(smem + kMap.q);
  T* sK = reinterpret_cast<T*>(smem + kMap.k);
  T* sV = reinterpret_cast<T*>(smem + kMap.v);
  float* sS = reinterpret_cast<float*>(smem + kMap.s) + warp_row * kScoreLd;
  T* sP = reinterpret_cast<T*>(sS);

  const tile::Mask mask(shape, seq.shift, seq.seqlen_k);
  const int first_row = m0 + warp_row;
  const int own_row = first_row + tile::lane_row(lane_idx);
  const tile::Range keys = mask.any_row(m0, min(m0 + kBlockM, seq.seqlen_q) - 1);
  const tile::Range visible = mask.row(own_row);

  tile::OnlineSoftmax softmax;  // of own_row; row_sum is this lane's part
  tile::FragmentC acc_o[kHeadDim / 16];
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) wmma::fill_fragment(acc_o[i], 0.0f);

  tile::FragmentA<T> rQ[kHeadDim / 16];
  const int n_begin = keys.begin / kBlockN * kBlockN;
  if (n_begin < keys.end) {
    tile::start_q_copy<kBlockM, kHeadDim, kLd, kNumThreads>(sQ, seq, params, shape, m0);
    tile::start_kv_copy<kBlockN, kHeadDim, kLd, kNumThreads>(sK, sV, seq, params, shape, n_begin,
                                                             keys.end);
    ptx::cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      ptx::load_matrix(rQ[d / 16], sQ + warp_row * kLd + d, kLd);
    }
  }
  int stage = 0;
  for (int n0 = n_begin; n0 < keys.end; n0 += kBlockN, stage ^= 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (n0 + kBlockN < keys.end) {
      const int next = (stage ^ 1) * kStage;
      tile::start_kv_copy<kBlockN, kHeadDim, kLd, kNumThreads>(sK + next, sV + next, seq, params,
                                                               shape, n0 + kBlockN, keys.end);
    }

    tile::row_group_scores<kBlockN, kHeadDim, kLd, kScoreLd>(sS, rQ, sK + stage * kStage);

    float x[kGroups][4];
    tile::load_scores(x, sS + tile::lane_row(lane_idx) * kScoreLd, lane_idx, visible, n0);
    __syncwarp();  // both lanes of a row have read its scores
    const float factor = tile::row_group_softmax(softmax, x, shape.scale_log2);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      tile::store(sP + tile::lane_row(lane_idx) * kProbLd + tile::lane_column(lane_idx, i), x[i]);
    }
    const bool rescales = __any_sync(tile::kFullMask, factor != 1.0f);
    if (rescales) write_factors(sS, factor, lane_idx);
    __syncwarp();  // all scores of the row group have been read or written
    if (rescales) rescale(acc_o, sS);
    multiply_pv<kHeadDim>(acc_o, sP, sV + stage * kStage);
  }

  // seed: row-sum
  softmax.row_sum = tile::reduce_sum<2>(softmax.row_sum);
  const tile::ResultRows<T> to(params, work);
  const tile::RowResult result = softmax.finalize(shape.scale_log2, to.sink);
  // seed: stored-rows
  const bool row_exists = own_row < seq.seqlen_q;
  if (to.lse && lane_idx % 2 == 0 && row_exists) to.lse[own_row] = result.lse;
  store_output<kHeadDim>(to.out + own_row * params.out.row_stride, row_exists, acc_o, sS,
                         result.scale, static_cast<int>(params.head_dim_v), shape.store_bytes,
                         lane_idx);
}

}  // namespace dlattn::wmma_smem
