#pragma once

#include "cuda/backward/sm90/traits.h"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"

// The matrix products of a consumer, with its 64 keys as rows but for dQ's. Started here, in flight
// until the consumer waits for them.
namespace dlattn::backward_sm90 {

// A product of the consumer's rows of K with Q, or of V with dO: both lie in rows along head_dim,
// of which the tiles have kBlockN and kBlockM. kQueries: those of the consumer.
template <typename T, int kHeadDim, int kBlockM, int kQueries = kBlockM,
          int kBlockN = block_n(kHeadDim)>
__device__ __forceinline__ void start_scores(float (&acc)[kQueries / 2], ptx::SmemAddress keys,
                                             ptx::SmemAddress queries) {
  const std::uint64_t a = ptx::wgmma_descriptor(keys, 0);
  const std::uint64_t b = ptx::wgmma_descriptor(queries, 0);
  ptx::wgmma_fence();
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16) {
    const int block = d / kBlockColumns, byte = d % kBlockColumns * 2;
    ptx::wgmma_ss<T, false>(acc, ptx::wgmma_advance(a, block * kBlockN * kBlockRowBytes + byte),
                            ptx::wgmma_advance(b, block * kBlockM * kBlockRowBytes + byte), d > 0);
  }
  ptx::wgmma_commit();
}

// dV += P^T dO, or dK += dS^T Q. The second operand lies query by query, so its rows run along N.
template <typename T, int kHeadDim, int kBlockM>
__device__ __forceinline__ void start_key_sums(float (&acc)[kHeadDim / 2],
                                               const std::uint32_t (&scores)[kBlockM / 16][4],
                                               ptx::SmemAddress queries) {
  const std::uint64_t b = ptx::wgmma_descriptor(queries, kBlockM * kBlockRowBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int m = 0; m < kBlockM; m += 16)
    ptx::wgmma_rs<T, true>(acc, scores[m / 16], ptx::wgmma_advance(b, m * kBlockRowBytes), true);
  ptx::wgmma_commit();
}

// The consumer's part of a step's dQ = dS K.
template <typename T, int kHeadDim, bool kSoftcap>
__device__ __forceinline__ void start_dq(float (&acc)[part_columns(kHeadDim, kSoftcap) / 2],
                                         ptx::SmemAddress ds, ptx::SmemAddress keys, int consumer) {
  constexpr int kRowParts = dq_parts(kHeadDim, kSoftcap).rows;
  constexpr int kBlockM = block_m(kHeadDim, kSoftcap), kBlockN = block_n(kHeadDim);
  const int row_part = consumer % kRowParts;
  const int column = consumer / kRowParts * part_columns(kHeadDim, kSoftcap);
  const std::uint64_t a = ptx::wgmma_descriptor(ds + row_part * kWarpgroupRows * kBlockRowBytes, 0);
  const std::uint64_t b = ptx::wgmma_descriptor(
      keys + column / kBlockColumns * kBlockN * kBlockRowBytes + column % kBlockColumns * 2,
      kBlockN * kBlockRowBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int n = 0; n < kBlockN; n += 16) {
    const int block = n / kBlockColumns, byte = n % kBlockColumns * 2;
    ptx::wgmma_ss<T, true>(acc, ptx::wgmma_advance(a, block * kBlockM * kBlockRowBytes + byte),
                           ptx::wgmma_advance(b, n * kBlockRowBytes), n > 0);
  }
  ptx::wgmma_commit();
}

// The row of queries that a lane gives to instructions which exchange a warp's 16 keys of scores
// with a consumer's block of them: it has the 64 columns of one.
__device__ __forceinline__ ptx::SmemAddress score_row(ptx::SmemAddress block, int warp, int lane) {
  const int query = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
  return block + query * kBlockRowBytes +
         (chunk ^ (lane % 8)) * 16;  // rows 8 apart are swizzled alike
}

// Stores a consumer's dS^T, or of wide heads P^T, in rows of queries.
template <int kBlockM>
__device__ __forceinline__ void store_ds(const std::uint32_t (&ds)[kBlockM / 16][4],
                                         ptx::SmemAddress block, int warp, int lane) {
  const ptx::SmemAddress row = score_row(block, warp, lane);
#pragma unroll
  for (int m = 0; m < kBlockM; m += 16)
    ptx::stmatrix_x4_trans(row + m * kBlockRowBytes, ds[m / 16]);
}

// For the consumers that have half of the columns of all keys.

// dV += P^T dO, or dK += dS^T Q, with both operands in shared memory, in rows of queries.
template <typename T, int kColumns, int kBlockM>
__device__ __forceinline__ void start_wide_key_sums(float (&acc)[kColumns / 2],
                                                    ptx::SmemAddress scores,
                                                    ptx::SmemAddress queries) {
  const std::uint64_t a = ptx::wgmma_descriptor(scores, 0);
  const std::uint64_t b = ptx::wgmma_descriptor(queries, kBlockM * kBlockRowBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int m = 0; m < kBlockM; m += 16)
    ptx::wgmma_ss<T, true, true>(acc, ptx::wgmma_advance(a, m * kBlockRowBytes),
                                 ptx::wgmma_advance(b, m * kBlockRowBytes), true);
  ptx::wgmma_commit();
}

// 64 columns of dQ = dS K, of all keys of the block or pair, and a step's 64 queries.
template <typename T, int kKeys>
__device__ __forceinline__ void start_wide_dq(float (&acc)[kBlockColumns / 2],
                                              ptx::SmemAddress scores, ptx::SmemAddress keys) {
  const std::uint64_t a = ptx::wgmma_descriptor(scores, 0);
  const std::uint64_t b = ptx::wgmma_descriptor(keys, 0);
  ptx::wgmma_fence();
#pragma unroll
  for (int n = 0; n < kKeys; n += 16) {
    const int block = n / kBlockColumns, byte = n % kBlockColumns * 2;
    ptx::wgmma_ss<T, true>(acc,
                           ptx::wgmma_advance(a, block * kWarpgroupRows * kBlockRowBytes + byte),
                           ptx::wgmma_advance(b, n * kBlockRowBytes), n > 0);
  }
  ptx::wgmma_commit();
}

}  // namespace dlattn::backward_sm90
