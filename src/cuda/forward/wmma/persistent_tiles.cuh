#pragma once

#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/tile/scheduler.cuh"

namespace dlattn::wmma {

// The work tiles of a block of the persistent kernel.
struct PersistentTiles : tile::PairedTiles {
  const AttentionParams& params;

  __device__ __forceinline__ PersistentTiles(const AttentionParams& params,
                                             const LaunchShape& shape)
      : PairedTiles{shape, shape.num_m_blocks.divisor() * shape.num_heads.divisor() *
                               static_cast<unsigned>(params.batch_size)},
        params(params) {}
};

// A work tile: which rows, and the tiles of keys that they see.
template <int kBlockM, int kBlockN>
struct PersistentTile {
  tile::WorkTile work;
  int m0;  // its first row
  tile::Mask mask;
  TileRange tiles;

  __device__ __forceinline__ PersistentTile(const PersistentTiles& all, unsigned index)
      : work(all.tile(index)),
        m0(work.m_block * kBlockM),
        mask(all.shape,
             position_shift(all.params.causal, static_cast<int>(all.params.seqlen_q),
                            static_cast<int>(all.params.seqlen_k)),
             static_cast<int>(all.params.seqlen_k)),
        tiles(mask, m0, min(m0 + kBlockM, static_cast<int>(all.params.seqlen_q)) - 1, kBlockN) {}
};

}  // namespace dlattn::wmma
