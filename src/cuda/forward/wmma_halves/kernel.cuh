#pragma once

// Attention by mma.sync for heads of more columns than a warp's registers hold.
//
// A thread block of 8 warps computes 64 query rows of one head. A pair of warps has 16 of them,
// each warp one half of the columns of q, k, v and out: its half of Q and of the unnormalised fp32
// output stay in its registers. Per tile of 32 keys:
//   1. wait for K, one barrier, start the copy of V;
//   2. each warp multiplies its halves of Q and K, and leaves that part of S in shared memory;
//   3. wait for V, one barrier, start the copy of the next tile's K;
//   4. both warps of a pair add up the same S, and so have the same softmax; O += P V.
// Shared memory: see SmemMap. The first barrier publishes K and frees V, the second one publishes V
// and S's parts and frees K. Where scores are modified the warps of a pair divide that among them,
// in shared memory, before a third barrier.

#include "cuda/forward/wmma_halves/score_parts.cuh"
#include "cuda/forward/wmma_halves/traits.h"
#include "cuda/forward/wmma_halves/warp_rows.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/mma/mask.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/swizzled_copy.cuh"

namespace dlattn::wmma_halves {

constexpr int kNumThreads = kNumWarps * 32;

// Starts the copy of kRows rows of q, k or v, the first `rows` of which exist, each half of their
// columns to a tile of its own.
template <int kRows, int kHeadDim, typename T>
__device__ __forceinline__ void start_copy(unsigned char* smem, const T* gmem,
                                           std::int64_t row_stride, int rows, int columns,
                                           int copy_bytes) {
  constexpr int kColumns = kHeadDim / kHalves;
  constexpr int kBytes = kRows * kColumns * static_cast<int>(sizeof(T));
  if (copy_bytes == 16) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      tile::copy_swizzled_rows<kRows, kColumns, kNumThreads>(
          ptx::smem_address(smem) + half * kBytes, gmem + half * kColumns, row_stride, rows,
          columns - half * kColumns);
    }
  } else {
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half) {
      tile::store_swizzled_rows<kRows, kColumns, kNumThreads>(smem + half * kBytes,
                                                              gmem + half * kColumns, row_stride,
                                                              rows, columns - half * kColumns);
    }
  }
  ptx::cp_async_commit();
}

// The results of a warp's rows: its columns of out, and lse by the first warp of a pair.
template <int kHeadDim, typename T, typename Rows>
__device__ __forceinline__ void write_results(const AttentionParams& params,
                                              const LaunchShape& shape,
                                              const tile::ResultRows<T>& to, const OutRows<T>& out,
                                              Rows& rows, int first_row, int half,
                                              float scale_log2) {
  // seed: flushed-results
  if (rows.is_flushed) rows.restore(out);
  const bool wide = shape.store_bytes == 16 && params.head_dim_v % 8 == 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const tile::RowResult result = rows.finalize(h, scale_log2, to.sink);
    const int row = first_row + rows.lane / 4 + 8 * h;
    if (to.lse && half == 0 && rows.lane % 4 == 0 && row < to.seqlen_q) to.lse[row] = result.lse;
    rows.store(out, h, result.scale, wide);
  }
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    kernel(const __grid_constant__ AttentionParams params,
           const __grid_constant__ LaunchShape shape) {
  constexpr SmemMap kMap = smem_map(kHeadDim);
  constexpr int kColumns = kHeadDim / kHalves;
  constexpr int kRowBytes = kColumns * static_cast<int>(sizeof(T));
  constexpr int kFlushTiles = tile::flush_tiles(kBlockN);

  const tile::WorkTile work = tile::scheduled_tile(shape, blockIdx.x);
  ptx::wait_for_grids_ahead();
  const tile::Sequence<T> seq(params, shape, work);
  const int m0 = work.m_block * kBlockM;
  if (m0 >= seq.seqlen_q) return;

  const int lane_idx = threadIdx.x % 32;
  const int pair = threadIdx.x / 32 / kHalves, half = threadIdx.x / 32 % kHalves;
  const int first_row = m0 + 16 * pair;
  unsigned char* smem = ptx::dynamic_smem();
  const ptx::SmemAddress sQ = ptx::smem_address(smem) + kMap.q + half * kBlockM * kRowBytes;
  const ptx::SmemAddress sK = ptx::smem_address(smem) + kMap.k + half * kBlockN * kRowBytes;
  const ptx::SmemAddress sV = ptx::smem_address(smem) + kMap.v + half * kBlockN * kRowBytes;
  const ScoreParts parts(smem + kMap.parts, pair, half, lane_idx);
  WarpRows<T, kColumns> rows(lane_idx);

  const tile::Mask mask(shape, seq.shift, seq.seqlen_k);
  const tile::Range keys = mask.any_row(m0, min(m0 + kBlockM, seq.seqlen_q) - 1);
  const int n_begin = keys.begin / kBlockN * kBlockN;
  const auto copy_k = [&](int n0) {
    start_copy<kBlockN, kHeadDim>(smem + kMap.k, seq.keys.k.row(n0), seq.keys.k.stride,
                                  keys.end - n0, static_cast<int>(params.head_dim),
                                  shape.copy_bytes);
  };
  const auto copy_v = [&](int n0) {
    start_copy<kBlockN, kHeadDim>(smem + kMap.v, seq.keys.v.row(n0), seq.keys.v.stride,
                                  keys.end - n0, static_cast<int>(params.head_dim_v),
                                  shape.copy_bytes);
  };
  // Seldom needed, these are worked out again rather than kept in registers.
  const auto work_again = [&] { return tile::scheduled_tile(shape, ptx::reread_block_index()); };
  const auto out_rows = [&] {
    const tile::ResultRows<T> to(params, work_again());
    return OutRows<T>(params, to, first_row, half * kColumns, lane_idx);
  };

  if (n_begin < keys.end) {
    start_copy<kBlockM, kHeadDim>(smem + kMap.q, seq.q + m0 * params.q.row_stride,
                                  params.q.row_stride, seq.seqlen_q - m0,
                                  static_cast<int>(params.head_dim), shape.copy_bytes);
    ptx::cp_async_wait<0>();
    __syncthreads();
    rows.load_queries(sQ + pair * 16 * kRowBytes);
    __syncthreads();  // all warps have Q: K and V may overwrite it
    copy_k(n_begin);
  }
  const bool modifies = tile::HeadScoreMod<T>(params, work).any;
  const float scale_log2 = modifies ? tile::kLog2e : shape.scale_log2;
#pragma unroll 1
  for (int n0 = n_begin; n0 < keys.end; n0 += kBlockN) {
    const tile::Range any = mask.any_row(first_row, first_row + 15);
    const bool sees =  // alike in both warps of a pair
        first_row < seq.seqlen_q && any.begin < n0 + kBlockN && n0 < any.end;
    ptx::cp_async_wait<0>();
    __syncthreads();
    copy_v(n0);
    float acc_s[1][kBlockN / 8][4];
    if (sees) {
      rows.multiply_keys(acc_s, sK);
      parts.store(acc_s);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (n0 + kBlockN < keys.end) copy_k(n0 + kBlockN);
    if (modifies) {
      if (sees) {
        parts.modify(tile::HeadScoreMod<T>(params, work_again()), first_row, n0, seq.seqlen_q,
                     seq.seqlen_k, seq.shift);
      }
      __syncthreads();
    }
    if (!sees) continue;
    parts.load(acc_s);
    if (!tile::contains_all(mask.every_row(first_row, first_row + 15), n0, kBlockN))
      tile::mma::apply_mask(acc_s, mask, first_row + lane_idx / 4, n0, lane_idx);
    const int i = (n0 - n_begin) / kBlockN;  // tiles that have been walked
    if (__builtin_expect(i >= kFlushTiles, 0)) {
      const bool pairs = shape.store_bytes >= 4 && params.head_dim_v % 2 == 0;  // as the plan asks
      if (rows.is_flushed && i % kFlushTiles == 0) rows.restore(out_rows());
      if (!rows.is_flushed && pairs) rows.flush(out_rows());
    }
    rows.attend(acc_s, scale_log2, sV, out_rows);
  }

  const tile::ResultRows<T> to(params, work_again());
  write_results<kHeadDim>(params, shape, to, out_rows(), rows, first_row, half, scale_log2);
}

}  // namespace dlattn::wmma_halves
