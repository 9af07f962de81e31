#pragma once

// Attention on CUDA cores: the correct baseline, and the oracle on the GPU for the tensor-core
// kernels.
//
// A thread block of 4 warps computes block_m query rows of one head; a warp owns block_m / 4 of
// them, start to end. Per tile of 32 keys: lane j computes the scores of key j with all rows of its
// warp; the probabilities go through shared memory; then lanes own columns of the output, held
// unnormalised in registers. Shared memory: see SmemMap. Barriers per tile: one before K and V are
// overwritten, one after they have landed; between a warp's writes and reads of its own rows of sP,
// a __syncwarp. With kCache keys lie in a cache, and an 8-bit one's are converted as they are
// copied (cached_keys.cuh).

#include "cuda/forward/scalar/cached_keys.cuh"
#include "cuda/forward/scalar/traits.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/columns.cuh"
#include "cuda/tile/load.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/totals.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::scalar {

constexpr int kNumThreads = kNumWarps * 32;

template <typename T, int kHeadDim>
struct Tiles {
  static constexpr int kBlockM = block_m(kHeadDim);
  static constexpr int kRows = kBlockM / kNumWarps;  // per warp
  static constexpr int kLd = row_elements(sizeof(T), kHeadDim);
  static constexpr SmemMap kMap = smem_map(sizeof(T), kHeadDim);
};

// Loads Q as fp32, so that the inner loop converts K alone. `staging`, where K will be, takes it as
// it is. `factor(x)`: what becomes of an element.
template <typename T, int kHeadDim, typename Sequence, typename Factor>
__device__ __forceinline__ void load_q(float* sQ, T* staging, const Sequence& seq,
                                       const AttentionParams& params, const LaunchShape& shape,
                                       int m0, Factor factor) {
  using Tile = Tiles<T, kHeadDim>;
  tile::start_q_copy<Tile::kBlockM, kHeadDim, Tile::kLd, kNumThreads>(staging, seq, params, shape,
                                                                      m0);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < Tile::kBlockM * kHeadDim; i += kNumThreads) {
    sQ[i] = factor(tile::to_float(staging[i / kHeadDim * Tile::kLd + i % kHeadDim]));
  }
}

// dot[r] = q_r . k of this lane's key. Both are zero past head_dim.
template <int kRows, int kHeadDim, typename T>
__device__ __forceinline__ void dot_products(float (&dot)[kRows], const float* sQ, const T* k,
                                             int head_dim) {
  constexpr int kCount = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int r = 0; r < kRows; ++r) dot[r] = 0.0f;
#pragma unroll 1
  for (int d = 0; d < head_dim; d += kCount) {
    float rK[kCount];
    tile::load(rK, k + d);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int part = 0; part < kCount; part += 4) {
        float rQ[4];
        tile::load(rQ, sQ + r * kHeadDim + d + part);
#pragma unroll
        for (int i = 0; i < 4; ++i) dot[r] += rQ[i] * rK[part + i];
      }
    }
  }
}

// Applies the score modification, bias and mask to the scores of key j with rows first_row and on.
// The loop over this lane's column of sP is rolled: repeated per row they would be too much code
// and take too many registers.
template <int kRows, typename T, typename Sequence>
__device__ __forceinline__ void apply_score_mod(float (&score)[kRows],
                                                const tile::HeadScoreMod<T>& score_mod,
                                                float* column, int first_row, int j,
                                                const Sequence& seq) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) column[r * kBlockN] = score[r];
  const int rows = j < seq.seqlen_k ? min(kRows, seq.seqlen_q - first_row) : 0;
#pragma unroll 1
  for (int r = 0; r < rows; ++r) {
    column[r * kBlockN] = score_mod(column[r * kBlockN], first_row + r, j, seq.shift);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) score[r] = column[r * kBlockN];
}

// Adds the accumulators of one run of keys (tile/accumulation_limits.h) to `totals`, and row
// lane_idx's sum to `total`.
template <int kRows, int kChunks, int kVecSize>
__device__ __forceinline__ void add_run(const tile::Totals<kRows, kChunks, kVecSize>& totals,
                                        tile::OnlineSoftmax& total,
                                        float (&acc_o)[kRows][kChunks][kVecSize],
                                        tile::OnlineSoftmax (&softmax)[kRows], float scale_log2,
                                        int lane_idx) {
  tile::OnlineSoftmax run;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float row_sum = tile::reduce_sum<32>(softmax[r].row_sum);
    softmax[r].row_sum = 0.0f;
    if (lane_idx == r) run = {softmax[r].row_max, row_sum};
  }
  const float factor = total.raise_max(run.row_max, scale_log2);
  // seed: add-run-sum
  total.row_sum += run.row_sum;
  totals.add(acc_o, [&](int r) { return __shfl_sync(tile::kFullMask, factor, r); });
}

// The thread blocks that an SM should hold, by which the compiler has registers to spare.
template <typename T, int kHeadDim, bool kCache>
constexpr int kBlocksPerSm = sizeof(T) == 4 && kHeadDim <= 64 && !kCache ? 4 : 3;

template <typename T, int kHeadDim, bool kCache>
__global__ void __launch_bounds__(kNumThreads, kBlocksPerSm<T, kHeadDim, kCache>)
    kernel(const __grid_constant__ AttentionParams params,
           const __grid_constant__ LaunchShape shape) {
  using Sequence = std::conditional_t<kCache, tile::CachedSequence<T>, tile::Sequence<T>>;
  using Tile = Tiles<T, kHeadDim>;
  using Columns = tile::LaneColumns<T, kHeadDim>;
  constexpr int kRows = Tile::kRows;

  const tile::WorkTile work = tile::scheduled_tile(shape, blockIdx.x);
  ptx::wait_for_grids_ahead();
  const Sequence seq(params, shape, work);
  const int m0 = work.m_block * Tile::kBlockM;
  if (m0 >= seq.seqlen_q) return;

  const int lane_idx = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * kRows;  // first row of this warp in the tile
  unsigned char* smem = ptx::dynamic_smem();
  float* sQ = reinterpret_cast<float*>(smem + Tile::kMap.q) + warp_row * kHeadDim;
  T* sK = reinterpret_cast<T*>(smem + Tile::kMap.k);
  T* sV = reinterpret_cast<T*>(smem + Tile::kMap.v);
  float* sP = reinterpret_cast<float*>(smem + Tile::kMap.p) + warp_row * kBlockN;

  const int head_kv = static_cast<int>(shape.heads_per_kv_head.quotient(work.head));
  [[maybe_unused]] float of_scores = 1.0f;
  if constexpr (kCache) of_scores = key_descales(params, work.batch, work.head, head_kv).scores;
  load_q<T, kHeadDim>(reinterpret_cast<float*>(smem + Tile::kMap.q), sK, seq, params, shape, m0,
                      [&](float x) { return kCache ? x * of_scores : x; });

  const tile::HeadScoreMod<T> score_mod(params, work);
  // seed: score-scale
  const float scale_log2 = score_mod.any ? tile::kLog2e : shape.scale_log2;
  const tile::Mask mask(shape, seq.shift, seq.seqlen_k);
  tile::Range keys = mask.any_row(m0, min(m0 + Tile::kBlockM, seq.seqlen_q) - 1);
  tile::Range unmasked = mask.every_row(m0 + warp_row, m0 + warp_row + kRows - 1);
  if constexpr (kCache) {
    keys.begin = max(keys.begin, seq.first_key);
    unmasked.begin = max(unmasked.begin, seq.first_key);
  }

  tile::OnlineSoftmax softmax[kRows];  // row_sum is this lane's part
  float acc_o[kRows][Columns::kChunks][Columns::kVecSize] = {};

  const tile::Totals<kRows, Columns::kChunks, Columns::kVecSize> totals(
      reinterpret_cast<float*>(smem + Tile::kMap.total) + warp_row * kHeadDim, lane_idx);
  tile::OnlineSoftmax total;  // of row lane_idx
  const bool has_runs = seq.seqlen_k > tile::one_run_keys(sizeof(T));
  const int run_keys = tile::run_keys(seq.seqlen_k);
  if (has_runs) totals.clear();

  for (int n0 = keys.begin / kBlockN * kBlockN; n0 < keys.end; n0 += kBlockN) {
    if (has_runs && (n0 & (run_keys - 1)) == 0) {
      add_run(totals, total, acc_o, softmax, scale_log2, lane_idx);
    }
    __syncthreads();  // all warps are done with the tile before
    if constexpr (kCache) {
      start_cache_copy<kBlockN, kHeadDim, Tile::kLd, kNumWarps>(
          sK, sV, tile::CacheSource(params, work.batch), params, shape.copy_bytes, head_kv, n0,
          keys);
    } else {
      tile::start_kv_copy<kBlockN, kHeadDim, Tile::kLd, kNumThreads>(sK, sV, seq, params, shape, n0,
                                                                     keys.end);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();

    float score[kRows];
    dot_products<kRows, kHeadDim>(score, sQ, sK + lane_idx * Tile::kLd,
                                  static_cast<int>(params.head_dim));
    if (score_mod.any)
      apply_score_mod(score, score_mod, sP + lane_idx, m0 + warp_row, n0 + lane_idx, seq);
    // seed: masked
    const bool masked = !tile::contains_all(unmasked, n0, kBlockN);
    tile::Range seeing_rows = mask.column(n0 + lane_idx);
    if constexpr (kCache) {
      if (n0 + lane_idx < seq.first_key) seeing_rows.end = seeing_rows.begin;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x = score[r];
      if (masked && !tile::contains(seeing_rows, m0 + warp_row + r)) x = -INFINITY;
      // seed: row-max
      const float factor = softmax[r].raise_max(tile::reduce_max<32>(x), scale_log2);
      const float p = softmax[r].probability(x, scale_log2);
      softmax[r].row_sum += p;
      sP[r * kBlockN + lane_idx] = p;
#pragma unroll
      for (int c = 0; c < Columns::kChunks; ++c) {
#pragma unroll
        // seed: rescale-output
        for (int e = 0; e < Columns::kVecSize; ++e) acc_o[r][c][e] *= factor;
      }
    }
    __syncwarp();
    tile::accumulate_pv<kRows, kBlockN, kBlockN, Tile::kLd>(acc_o, sP, sV, lane_idx);
  }

  if (has_runs) {
    add_run(totals, total, acc_o, softmax, scale_log2, lane_idx);
    totals.take(acc_o);
#pragma unroll
    for (int r = 0; r < kRows; ++r) softmax[r].row_sum = lane_idx == r ? total.row_sum : 0.0f;
  }

  // The work tile is looked up again: kept through the loop, it would spill at head_dim 64 in fp32.
  const tile::WorkTile same = tile::scheduled_tile(shape, ptx::reread_block_index());
  const tile::ResultRows<T> to(params, same);
  [[maybe_unused]] float of_values = 1.0f;
  if constexpr (kCache) {
    of_values = key_descales(params, same.batch, same.head,
                             static_cast<int>(shape.heads_per_kv_head.quotient(same.head)))
                    .v;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = m0 + warp_row + r;
    // seed: row-sum
    softmax[r].row_sum = tile::reduce_sum<32>(softmax[r].row_sum);
    // seed: stored-rows
    if (row >= seq.seqlen_q) continue;
    tile::RowResult result = softmax[r].finalize(scale_log2, to.sink);
    if constexpr (kCache) {
      if (result.scale != 0.0f) result.scale *= of_values;
    }
    Columns::store_row(to.out + row * params.out.row_stride, acc_o[r], lane_idx, result.scale,
                       static_cast<int>(params.head_dim_v), shape.store_bytes);
    if (to.lse && lane_idx == 0) to.lse[row] = result.lse;
  }
}

}  // namespace dlattn::scalar
