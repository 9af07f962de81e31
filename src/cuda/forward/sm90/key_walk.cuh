#pragma once

#include "cuda/forward/sm90/tiles.cuh"
#include "cuda/tile/warp.cuh"

// How a work tile gets from the producer to the consumers, and what a consumer walks for it.
namespace dlattn::sm90 {

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

// Which tiles of keys a consumer walks for one work tile.
template <int kBlockM, int kBlockN>
struct KeyWalk {
  tile::SequenceTile work;
  tile::Mask mask;
  int first_row;      // of the consumer
  tile::Range all;    // tiles that at least one consumer of the block sees
  tile::Range tiles;  // tiles that this consumer sees
  tile::Range whole;  // tiles of which each of its rows sees all keys

  __device__ __forceinline__ KeyWalk(const tile::SequenceTile& work, const tile::Mask& mask,
                                     int consumer)
      : work(work),
        mask(mask),
        first_row(work.m_block * kBlockM + consumer * kWarpgroupRows),
        all(visible_tiles(mask, work.m_block * kBlockM,
                          min(work.m_block * kBlockM + kBlockM, work.seqlen_q) - 1, kBlockN)),
        tiles(visible_tiles(mask, first_row, min(first_row + kWarpgroupRows, work.seqlen_q) - 1,
                            kBlockN)),
        whole(whole_tiles(mask, first_row, kBlockN)) {}

  __device__ __forceinline__ bool sees_any() const { return tiles.begin < tiles.end; }
  // The position of the consumer's first row, counted from tile n's first key.
  __device__ __forceinline__ int position(int n) const {
    return mask.position(first_row) - n * kBlockN;
  }
  __device__ __forceinline__ bool is_edge(int n) const { return n < whole.begin || n >= whole.end; }
};

}  // namespace dlattn::sm90
