#pragma once

#include "cuda/tile/wgmma/mask.cuh"

namespace dlattn::tile::wgmma {

// The tiles of keys that a consumer walks for one work tile.
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

}  // namespace dlattn::tile::wgmma
