#pragma once

#include "cuda/tile/varlen_scheduler.cuh"
#include "cuda/tile/warp.cuh"

// Passes a work tile from the producer to the consumers, by way of shared memory. `shared` has a
// place for it, work_tile(use), beside each stage of Q, and Q's barriers, `queries`.
namespace dlattn::tile::wgmma {

// Leaves a work tile for the consumers, which read it when its Q has arrived.
template <typename Shared>
__device__ __forceinline__ void hand_over(const Shared& shared, unsigned query_use,
                                          const tile::SequenceTile& work) {
  shared.queries.wait_empty(query_use);
  *shared.work_tile(query_use) = work;
}

// The work tile that Q was copied for. The shuffles tell the compiler that it is the same in all
// lanes.
template <typename Shared>
__device__ __forceinline__ tile::SequenceTile received_tile(const Shared& shared,
                                                            unsigned query_use) {
  shared.queries.wait_full(query_use);
  const auto uniform = [](int x) { return __shfl_sync(tile::kFullMask, x, 0); };
  const tile::SequenceTile work = *shared.work_tile(query_use);
  __syncwarp();  // one lane will release it for all
  return {{uniform(work.m_block), work.head, work.batch},
          work.start_q,
          uniform(work.seqlen_q),
          uniform(work.seqlen_k)};
}

}  // namespace dlattn::tile::wgmma
