#pragma once

#include "cuda/forward/sm90_fp8/setup.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/elements.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"

// Both matrix products of a consumer: its 64 rows with the keys of a tile. Started here, in flight
// until the consumer waits for them.
namespace dlattn::sm90_fp8 {

using Element = __nv_fp8_e4m3;
constexpr int kDepth = 32;  // of one instruction, along K

// S = Q K^T.
template <int kHeadDim, int kBlockN>
__device__ __forceinline__ void start_qk(float (&acc_s)[kBlockN / 2], ptx::SmemAddress sQ,
                                         ptx::SmemAddress sK) {
  const std::uint64_t q = ptx::wgmma_descriptor(sQ, 0);
  const std::uint64_t k = ptx::wgmma_descriptor(sK, 0);
  ptx::wgmma_fence();
#pragma unroll
  for (int d = 0; d < kHeadDim; d += kDepth) {
    const int block = d / kBlockColumns, byte = d % kBlockColumns;
    ptx::wgmma_ss<Element, false>(
        acc_s, ptx::wgmma_advance(q, block * kWarpgroupRows * kBlockRowBytes + byte),
        ptx::wgmma_advance(k, block * kBlockN * kBlockRowBytes + byte), d > 0);
  }
  ptx::wgmma_commit();
}

// The product of P and kColumns columns of one tile of V, which lies transposed.
template <int kColumns, int kBlockN>
__device__ __forceinline__ void start_pv(float (&acc_pv)[kColumns / 2],
                                         const std::uint32_t (&rP)[kBlockN / kDepth][4],
                                         ptx::SmemAddress sV) {
  const std::uint64_t v = ptx::wgmma_descriptor(sV, 0);
  ptx::wgmma_fence();
#pragma unroll
  for (int n = 0; n < kBlockN; n += kDepth)
    ptx::wgmma_rs<Element, false>(acc_pv, rP[n / kDepth], ptx::wgmma_advance(v, n), n > 0);
  ptx::wgmma_commit();
}

// O += P V, a part of the columns after the other: where registers allow it, the next product runs
// while one is added.
// `add(o, pv)` is an element of the sum.
template <int kHeadDim, int kBlockN, typename Add>
__device__ __forceinline__ void add_pv(float (&acc_o)[kHeadDim / 2],
                                       const std::uint32_t (&rP)[kBlockN / kDepth][4],
                                       ptx::SmemAddress sV, Add add) {
  constexpr int kColumns = 64, kProducts = kHeadDim / kColumns;
  constexpr int kInFlight = kHeadDim <= 192 ? 2 : 1;
  float acc_pv[kInFlight][kColumns / 2];
  const auto start = [&](int i) {
    start_pv<kColumns, kBlockN>(acc_pv[i % kInFlight], rP, sV + tile_bytes(i * kColumns, kBlockN));
  };
  if (kInFlight > 1) start(0);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int latest = i + kInFlight - 1;
    if (latest < kProducts) {
      start(latest);
      ptx::wgmma_wait<kInFlight - 1>();
    } else {
      ptx::wgmma_wait<0>();
    }
    // seed: add-columns
#pragma unroll
    for (int d = 0; d < kColumns / 2; ++d)
      acc_o[i * kColumns / 2 + d] = add(acc_o[i * kColumns / 2 + d], acc_pv[i % kInFlight][d]);
  }
}

// Probabilities as the operand of the product with V: of two neighbouring groups of 8 keys a lane
// has four of each row, which are neighbours in the order of the transposed V.
template <int kScores>
__device__ __forceinline__ void pack_probabilities(std::uint32_t (&rP)[kScores / 16][4],
                                                   const float (&p)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores / 16; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* const x = p + 16 * i + e / 2 * 8 + e % 2 * 2;
      rP[i][e] = ptx::convert_e4m3x4(x[0], x[1], x[4], x[5]);
    }
  }
}

// S = Q K^T again for this warp's 16 rows alone, by warp-level instructions on the same tiles: in
// fp16, which holds every number of e4m3, and with accumulators of the same layout.
template <int kHeadDim, int kBlockN>
__device__ __forceinline__ void recompute_scores(float (&acc_s)[kBlockN / 2], ptx::SmemAddress sQ,
                                                 ptx::SmemAddress sK) {
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) acc_s[i] = 0.0f;
  const ThreadIndex thread;
  const int warp = thread.warp, lane = thread.lane;
#pragma unroll 1
  for (int d = 0; d < kHeadDim; d += 16) {
    const int block = d / kBlockColumns, chunk = (d % kBlockColumns / 16 ^ lane % 8) * 16;
    // A chunk of 16 columns of both tiles: which of them a lane's numbers are does not matter as
    // long as it is the same in both.
    std::uint32_t bytes[4], rQ[4];
    ptx::ldmatrix_x4(bytes, sQ + block * kWarpgroupRows * kBlockRowBytes +
                                (warp * 16 + lane % 16) * kBlockRowBytes + chunk);
    ptx::convert_e4m3x4_to_half(bytes[0], &rQ[0], &rQ[2]);
    ptx::convert_e4m3x4_to_half(bytes[1], &rQ[1], &rQ[3]);
    const ptx::SmemAddress keys =
        sK + block * kBlockN * kBlockRowBytes + lane * kBlockRowBytes + chunk;
#pragma unroll
    for (int n = 0; n < kBlockN; n += 32) {
      ptx::ldmatrix_x4(bytes, keys + n * kBlockRowBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint32_t rK[2];
        ptx::convert_e4m3x4_to_half(bytes[i], &rK[0], &rK[1]);
        float (&c)[4] = *reinterpret_cast<float (*)[4]>(&acc_s[n / 2 + 4 * i]);
        ptx::mma_m16n8k16<half>(c, rQ, rK[0], rK[1]);
      }
    }
  }
  __syncwarp();  // one lane will release the tile for all
}

}  // namespace dlattn::sm90_fp8
