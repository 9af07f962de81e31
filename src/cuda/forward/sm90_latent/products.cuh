#pragma once

#include "cuda/forward/sm90_latent/setup.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"

// Both matrix products of a consumer. Started here, in flight until the consumer waits for them.
namespace dlattn::sm90_latent {

// S = Q K^T of the consumer's own tile, as its columns arrive.
template <typename T>
__device__ __forceinline__ void start_scores(float (&acc_s)[kBlockN / 2], const Shared& shared,
                                             int consumer, unsigned use) {
  const std::uint64_t q = ptx::wgmma_descriptor(shared.q(), 0);
  const std::uint64_t k = ptx::wgmma_descriptor(shared.block(consumer, 0), 0);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    shared.wait_full(consumer, use, block);
    ptx::wgmma_fence();
#pragma unroll
    for (int byte = 0; byte < kBlockRowBytes; byte += 16 * static_cast<int>(sizeof(T))) {
      const int at = block * kBlockBytes + byte;
      ptx::wgmma_ss<T, false>(acc_s, ptx::wgmma_advance(q, at), ptx::wgmma_advance(k, at), at > 0);
    }
  }
  ptx::wgmma_commit();
}

// The values of a consumer's columns. They lie key by key, so their rows run along N.
__device__ __forceinline__ std::uint64_t values(const Shared& shared, int owner, int consumer) {
  return ptx::wgmma_descriptor(shared.block(owner, consumer * kOwnBlocks), kBlockBytes);
}

// O += P V of the consumer's own tile.
template <typename T>
__device__ __forceinline__ void start_own_values(float (&acc_o)[kHalf / 2],
                                                 const std::uint32_t (&rP)[kBlockN / 16][4],
                                                 const Shared& shared, int consumer) {
  const std::uint64_t v = values(shared, consumer, consumer);
  ptx::wgmma_fence();
#pragma unroll
  for (int n = 0; n < kBlockN; n += 16)
    ptx::wgmma_rs<T, true>(acc_o, rP[n / 16], ptx::wgmma_advance(v, n * kBlockRowBytes), true);
  ptx::wgmma_commit();
}

// The same of the other consumer's tile, whose probabilities are in the rest block.
template <typename T>
__device__ __forceinline__ void start_other_values(float (&acc_o)[kHalf / 2], const Shared& shared,
                                                   int consumer) {
  const int owner = 1 - consumer;
  const std::uint64_t v = values(shared, owner, consumer);
  const std::uint64_t p = ptx::wgmma_descriptor(shared.block(owner, kRestBlock), 0);
  ptx::wgmma_fence();
#pragma unroll
  for (int n = 0; n < kBlockN; n += 16) {
    ptx::wgmma_ss<T, true>(acc_o, ptx::wgmma_advance(p, n * static_cast<int>(sizeof(T))),
                           ptx::wgmma_advance(v, n * kBlockRowBytes), true);
  }
  ptx::wgmma_commit();
}

// Leaves a warp's 16 rows of probabilities in the rest block.
__device__ __forceinline__ void store_probabilities(const std::uint32_t (&rP)[kBlockN / 16][4],
                                                    const Shared& shared, int consumer, int warp,
                                                    int lane) {
  const int row = warp * 16 + lane % 16;
  const ptx::SmemAddress to = shared.block(consumer, kRestBlock) + row * kBlockRowBytes;
#pragma unroll
  for (int i = 0; i < kBlockN / 16; ++i)
    ptx::stmatrix_x4(to + ((2 * i + lane / 16) ^ (row % 8)) * 16, rP[i]);
}

}  // namespace dlattn::sm90_latent
