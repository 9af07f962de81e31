#pragma once

// Attention with Q K^T on tensor cores through nvcuda::wmma, and P V on CUDA cores.
//
// A thread block of 4 warps computes 64 query rows of one head. A warp owns one row group, which
// has exactly 16 rows, from start to end; rows past the sequence's end are zero. Per tile of 32
// keys a warp computes its scores into shared memory, turns them into fp32 probabilities there (two
// lanes a row), and multiplies them with V. A lane owns columns of the output for all 16 rows, held
// unnormalised in registers. Shared memory: see SmemMap. Barriers per tile: one before K and V are
// overwritten, one after they have landed. Within a warp: __syncwarp wherever lanes read what other
// lanes wrote to the warp's rows of sS.

#include <mma.h>  // before ptx/elements.cuh

#include "cuda/forward/wmma_qk/traits.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/tile/columns.cuh"
#include "cuda/tile/load.cuh"
#include "cuda/tile/row_group.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/totals.cuh"

namespace dlattn::wmma_qk {

constexpr int kNumThreads = kNumWarps * 32;
constexpr int kRows = tile::kRowGroupRows;
constexpr int kGroups = kBlockN / 8;  // groups of four keys per lane

// Adds the accumulators of one run of keys (tile/accumulation_limits.h) to `totals`, and the sum of
// this lane's row to `total`.
template <int kChunks, int kVecSize>
__device__ __forceinline__ void add_run(const tile::Totals<kRows, kChunks, kVecSize>& totals,
                                        tile::OnlineSoftmax& total,
                                        float (&acc_o)[kRows][kChunks][kVecSize],
                                        tile::OnlineSoftmax& softmax, float scale_log2) {
  const float factor = total.raise_max(softmax.row_max, scale_log2);
  total.row_sum += softmax.row_sum;
  // seed: new-run
  softmax.row_sum = 0.0f;
  totals.add(acc_o, [&](int r) { return __shfl_sync(tile::kFullMask, factor, 2 * r); });
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, kHeadDim <= 64 ? 4 : 3)
    kernel(const __grid_constant__ AttentionParams params,
           const __grid_constant__ LaunchShape shape) {
  using Columns = tile::LaneColumns<T, kHeadDim>;
  constexpr int kLd = row_elements(kHeadDim);
  constexpr SmemMap kMap = smem_map(kHeadDim);

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
  float* row_scores = sS + tile::lane_row(lane_idx) * kScoreLd;

  const tile::Mask mask(shape, seq.shift, seq.seqlen_k);
  const int first_row = m0 + warp_row;
  const tile::Range keys = mask.any_row(m0, min(m0 + kBlockM, seq.seqlen_q) - 1);
  const tile::Range visible = mask.row(first_row + tile::lane_row(lane_idx));

  const int n_begin = keys.begin / kBlockN * kBlockN;
  if (n_begin < keys.end) {  // lands with the first tile
    tile::start_q_copy<kBlockM, kHeadDim, kLd, kNumThreads>(sQ, seq, params, shape, m0);
  }
  tile::OnlineSoftmax softmax;  // of row lane_row(lane_idx); row_sum is this lane's part
  float acc_o[kRows][Columns::kChunks][Columns::kVecSize] = {};

  const tile::Totals<kRows, Columns::kChunks, Columns::kVecSize> totals(
      reinterpret_cast<float*>(smem + kMap.total) + warp_row * kHeadDim, lane_idx);
  tile::OnlineSoftmax total;  // of this lane's row
  const bool has_runs = seq.seqlen_k > tile::one_run_keys(sizeof(T));
  const int run_keys = tile::run_keys(seq.seqlen_k);
  if (has_runs) totals.clear();

  for (int n0 = n_begin; n0 < keys.end; n0 += kBlockN) {
    if (has_runs && (n0 & (run_keys - 1)) == 0) {
      add_run(totals, total, acc_o, softmax, shape.scale_log2);
    }
    __syncthreads();  // all warps are done with the tile before
    tile::start_kv_copy<kBlockN, kHeadDim, kLd, kNumThreads>(sK, sV, seq, params, shape, n0,
                                                             keys.end);
    ptx::cp_async_wait<0>();
    __syncthreads();

    tile::FragmentA<T> rQ[kHeadDim / 16];
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      ptx::load_matrix(rQ[d / 16], sQ + warp_row * kLd + d, kLd);
    }
    tile::row_group_scores<kBlockN, kHeadDim, kLd, kScoreLd>(sS, rQ, sK);

    float x[kGroups][4];
    tile::load_scores(x, row_scores, lane_idx, visible, n0);
    const float factor = tile::row_group_softmax(softmax, x, shape.scale_log2);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      tile::store(row_scores + tile::lane_column(lane_idx, i), x[i]);
    }
    __syncwarp();

#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // seed: row-factor
      const float row_factor = __shfl_sync(tile::kFullMask, factor, 2 * r);
#pragma unroll
      for (int c = 0; c < Columns::kChunks; ++c) {
#pragma unroll
        // seed: rescale-output
        for (int e = 0; e < Columns::kVecSize; ++e) acc_o[r][c][e] *= row_factor;
      }
    }
    tile::accumulate_pv<kRows, kBlockN, kScoreLd, kLd>(acc_o, sS, sV, lane_idx);
  }

  if (has_runs) {
    add_run(totals, total, acc_o, softmax, shape.scale_log2);
    totals.take(acc_o);
    softmax.row_sum = total.row_sum;
  }
  // seed: row-sum
  softmax.row_sum = tile::reduce_sum<2>(softmax.row_sum);
  const tile::ResultRows<T> to(params, work);
  const tile::RowResult result = softmax.finalize(shape.scale_log2, to.sink);
  const int own_row = first_row + tile::lane_row(lane_idx);
  if (to.lse && lane_idx % 2 == 0 && own_row < seq.seqlen_q) to.lse[own_row] = result.lse;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float scale = __shfl_sync(tile::kFullMask, result.scale, 2 * r);
    // seed: stored-rows
    if (first_row + r >= seq.seqlen_q) continue;
    Columns::store_row(to.out + (first_row + r) * params.out.row_stride, acc_o[r], lane_idx, scale,
                       static_cast<int>(params.head_dim_v), shape.store_bytes);
  }
}

}  // namespace dlattn::wmma_qk
