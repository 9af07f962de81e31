#pragma once

#include "cuda/forward/sm90/setup.cuh"
#include "cuda/forward/sm90/traits.h"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"

// Both matrix products of a consumer: its 64 rows with the keys of a tile. Started here, in flight
// until the consumer waits for them.
namespace dlattn::sm90 {

// Address of chunk `chunk` (of 8 elements) of a row, in a tile of blocks of `block_rows` rows.
__device__ __forceinline__ int swizzled_offset(int row, int chunk, int block_rows) {
  return chunk / 8 * block_rows * kBlockRowBytes + row * kBlockRowBytes +
         ((chunk % 8) ^ (row % 8)) * 16;
}

// S = Q K^T.
template <typename T, int kHeadDim, int kBlockN>
__device__ __forceinline__ void start_qk(float (&acc_s)[kBlockN / 2], ptx::SmemAddress sQ,
                                         ptx::SmemAddress sK) {
  const std::uint64_t q = ptx::wgmma_descriptor(sQ, 0);
  const std::uint64_t k = ptx::wgmma_descriptor(sK, 0);
  ptx::wgmma_fence();
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16) {
    const int block = d / kBlockColumns, byte = d % kBlockColumns * static_cast<int>(sizeof(T));
    // seed: step-along-k
    ptx::wgmma_ss<T, false>(acc_s,
                            ptx::wgmma_advance(q, block * kWarpgroupRows * kBlockRowBytes + byte),
                            ptx::wgmma_advance(k, block * kBlockN * kBlockRowBytes + byte), d > 0);
  }
  ptx::wgmma_commit();
}

// O += P V. V lies key by key, so its rows run along N.
template <typename T, int kHeadDim, int kBlockN>
__device__ __forceinline__ void start_pv(float (&acc_o)[kHeadDim / 2],
                                         const std::uint32_t (&rP)[kBlockN / 16][4],
                                         ptx::SmemAddress sV) {
  // seed: v-descriptor
  const std::uint64_t v = ptx::wgmma_descriptor(sV, kBlockN * kBlockRowBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int n = 0; n < kBlockN; n += 16)
    ptx::wgmma_rs<T, true>(acc_o, rP[n / 16], ptx::wgmma_advance(v, n * kBlockRowBytes), true);
  ptx::wgmma_commit();
}

// S = Q K^T again for this warp's 16 rows alone, by warp-level instructions: they read the same
// tiles, and their accumulators have the same layout.
template <typename T, int kHeadDim, int kBlockN>
__device__ __forceinline__ void recompute_scores(float (&acc_s)[kBlockN / 2], ptx::SmemAddress sQ,
                                                 ptx::SmemAddress sK) {
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) acc_s[i] = 0.0f;
  const ThreadIndex thread;
  const int warp = thread.warp, lane = thread.lane;
  // Rows 8 apart are swizzled alike.
  const int q_row = warp * 16 + lane % 16, k_row = lane / 16 * 8 + lane % 8;
#pragma unroll 1
  for (int d = 0; d < kHeadDim; d += 16) {
    std::uint32_t rQ[4];
    ptx::ldmatrix_x4(rQ, sQ + swizzled_offset(q_row, d / 8 + lane / 16, kWarpgroupRows));
    const ptx::SmemAddress lane_k = sK + swizzled_offset(k_row, d / 8 + lane / 8 % 2, kBlockN);
#pragma unroll
    for (int n = 0; n < kBlockN; n += 16) {
      std::uint32_t rK[4];
      ptx::ldmatrix_x4(rK, lane_k + n * kBlockRowBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&c)[4] = *reinterpret_cast<float (*)[4]>(&acc_s[n / 2 + 4 * half]);
        ptx::mma_m16n8k16<T>(c, rQ, rK[2 * half], rK[2 * half + 1]);
      }
    }
  }
  __syncwarp();  // one lane will release the tile for all
}

}  // namespace dlattn::sm90
