#pragma once

#include "cuda/forward/wmma/copy.cuh"
#include "cuda/forward/wmma/stages.cuh"
#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/forward/wmma/traits.h"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma {

// Copies of a block's K and V by cp.async, tile by tile from the last to the first. All threads of
// the block take part. Tile i of the walk goes to stage i % kStages.
template <typename T, int kHeadDim, int kVariant>
struct Producer {
  static constexpr TileShape kShape = tile_shape(kHeadDim, kVariant);
  static constexpr SmemMap kMap = smem_map(kHeadDim, kVariant);
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kStageBytes = kBlockN * kHeadDim * static_cast<int>(sizeof(T));
  using Copy = TileCopy<T, kHeadDim, kShape.num_warps * 32>;
  using BlockStages = Stages<kShape.num_warps, resolved(kShape.handover), kShape.stages>;

  const AttentionParams& params;
  const BlockStages stages;
  const ptx::SmemAddress sK, sV;
  const int head_dim, head_dim_v;
  const int count;            // of tiles
  const T* next_k = nullptr;  // where the copy of the next tile begins
  const T* next_v = nullptr;

  __device__ __forceinline__ Producer(const AttentionParams& params, const TileRange& tiles)
      : params(params),
        stages(ptx::smem_address(ptx::dynamic_smem()) + kMap.mbarriers),
        sK(ptx::smem_address(ptx::dynamic_smem()) + kMap.k),
        sV(ptx::smem_address(ptx::dynamic_smem()) + kMap.v),
        head_dim(static_cast<int>(params.head_dim)),
        head_dim_v(static_cast<int>(params.head_dim_v)),
        count(tiles.end - tiles.begin) {}

  // Where tile i's K and V are in shared memory.
  __device__ __forceinline__ ptx::SmemAddress k(int i) const {
    return sK + i % kShape.stages * kStageBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress v(int i) const {
    return sV + i % kShape.stages * kStageBytes;
  }

  // The sequence's last tile, the only one that may be ragged.
  __device__ __forceinline__ void copy_first(const tile::Sequence<T>& seq, const TileRange& tiles) {
    const std::int64_t n0 = (tiles.end - 1) * kBlockN;
    const int keys = seq.seqlen_k - static_cast<int>(n0);
    Copy::template edge<kBlockN>(sK, seq.keys.k.row(n0), seq.keys.k.stride, keys, head_dim);
    Copy::template edge<kBlockN>(sV, seq.keys.v.row(n0), seq.keys.v.stride, keys, head_dim_v);
    stages.publish(0);
  }

  // Where copy_next() will begin.
  __device__ __forceinline__ void set_next(const tile::Sequence<T>& seq, const TileRange& tiles) {
    const int next = (tiles.end - 2) * kBlockN;
    next_k = Copy::template last_row<kBlockN>(seq.keys.k, next);
    next_v = Copy::template last_row<kBlockN>(seq.keys.v, next);
  }

  // Tile i + 1 of the walk, if there is one.
  __device__ __forceinline__ void copy_next(int i) {
    if (i + 1 >= count) return;
    if (i > 0) stages.wait_empty(i - 1);
    const int next = kStageBytes - i % kShape.stages * kStageBytes;
    Copy::template full_tile<kBlockN>(sK + next, next_k, params.k.row_stride, head_dim);
    Copy::template full_tile<kBlockN>(sV + next, next_v, params.v.row_stride, head_dim_v);
    stages.publish(i + 1);
  }
};

}  // namespace dlattn::wmma
