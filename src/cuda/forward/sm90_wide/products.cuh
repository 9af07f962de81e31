#pragma once

#include "cuda/forward/sm90_wide/setup.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"

// Parts of both matrix products of a consumer, a slot each. Started here as groups of their own, in
// flight until the consumer waits for them.
namespace dlattn::sm90_wide {

// S = Q K^T, or S += Q K^T behind the first one, of 64 columns of the heads.
template <typename T, int kTile>
__device__ __forceinline__ void start_scores(float (&acc_s)[kBlockN / 2],
                                             const Shared<kTile>& shared, int block,
                                             ptx::SmemAddress slot) {
  const std::uint64_t q = ptx::wgmma_descriptor(shared.q() + block * kSlotBytes, 0);
  const std::uint64_t k = ptx::wgmma_descriptor(slot, 0);
  ptx::wgmma_fence();
#pragma unroll
  for (int byte = 0; byte < kBlockRowBytes; byte += 16 * static_cast<int>(sizeof(T))) {
    ptx::wgmma_ss<T, false>(acc_s, ptx::wgmma_advance(q, byte), ptx::wgmma_advance(k, byte),
                            block + byte > 0);
  }
  ptx::wgmma_commit();
}

// The values of a step. They lie key by key, so their rows run along N.
__device__ __forceinline__ std::uint64_t values(ptx::SmemAddress slot) {
  return ptx::wgmma_descriptor(slot, kStepBlockBytes);
}

// O += P V of 16 keys, with the consumer's own probabilities.
template <typename T, int kAccumulators>
__device__ __forceinline__ void start_own_values(float (&acc_o)[kAccumulators],
                                                 const std::uint32_t (&rP)[4],
                                                 ptx::SmemAddress slot) {
  ptx::wgmma_fence();
  ptx::wgmma_rs<T, true>(acc_o, rP, values(slot), true);
  ptx::wgmma_commit();
}

// The same with those that the other consumer has left in shared memory.
template <typename T, int kAccumulators, int kTile>
__device__ __forceinline__ void start_other_values(float (&acc_o)[kAccumulators],
                                                   const Shared<kTile>& shared, int owner, int step,
                                                   ptx::SmemAddress slot) {
  const std::uint64_t p = ptx::wgmma_descriptor(shared.probabilities(owner), 0);
  ptx::wgmma_fence();
  ptx::wgmma_ss<T, true>(acc_o,
                         ptx::wgmma_advance(p, step * kStepKeys * static_cast<int>(sizeof(T))),
                         values(slot), true);
  ptx::wgmma_commit();
}

// Leaves a warp's 16 rows of probabilities for the other consumer.
template <int kTile>
__device__ __forceinline__ void store_probabilities(const std::uint32_t (&rP)[kSteps][4],
                                                    const Shared<kTile>& shared, int consumer,
                                                    int warp, int lane) {
  const int row = warp * 16 + lane % 16;
  const ptx::SmemAddress to = shared.probabilities(consumer) + row * kBlockRowBytes;
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    ptx::stmatrix_x4(to + ((2 * i + lane / 16) ^ (row % 8)) * 16, rP[i]);
}

}  // namespace dlattn::sm90_wide
