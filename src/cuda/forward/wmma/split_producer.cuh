#pragma once

#include <utility>

#include "cuda/forward/wmma/copy.cuh"
#include "cuda/forward/wmma/split_sequence.cuh"
#include "cuda/forward/wmma/split_traits.h"
#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/forward/wmma/traits.h"

namespace dlattn::wmma {

// The tiles of a group of warps, walked from the last to the first.
template <int kKeyGroups>
struct GroupTiles {
  int first;
  int count;

  __device__ __forceinline__ GroupTiles(const TileRange& tiles, int group) {
    first = tiles.end - 1 - group;
    count = first < tiles.begin ? 0 : (first - tiles.begin) / kKeyGroups + 1;
  }
  __device__ __forceinline__ int tile(int i) const { return first - i * kKeyGroups; }
};

// A group's copies of its own tiles of K and V into its own stages;
// and the block's copy of Q. Stage i holds V of the group's tile i and K of tile i + 1. K of tile 0
// comes alone, into the stage before.
template <typename T, int kHeadDim, int kVariant>
struct SplitProducer {
  static constexpr SplitShape kShape = split_shape(kHeadDim, kVariant == kSinglePass);
  static constexpr SplitSmemMap kMap = split_smem_map(kHeadDim, kVariant == kSinglePass);
  static constexpr int kBlockM = block_m(kShape);
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kStages = kShape.stages;
  static constexpr int kFirstStages = kShape.single_pass ? kStages : kStages - 1;  // copied at once
  static constexpr int kStageBytes = 2 * kMap.tile;
  static constexpr int kGroupThreads = kShape.row_groups * 32;
  using GroupCopy = TileCopy<T, kHeadDim, kGroupThreads, true>;
  using BlockCopy = TileCopy<T, kHeadDim, kShape.key_groups * kGroupThreads>;
  using Tiles = GroupTiles<kShape.key_groups>;
  static_assert(!kShape.single_pass || kStages == 2);

  const SplitParams& params;
  const int seqlen_k;
  const Tiles tiles;
  const ptx::SmemAddress stages;  // the group's
  // This thread's chunks of the first tiles, and from one tile to the next.
  const int first_row, first_chunk;
  const int k_chunk, v_chunk;
  const int k_tile, v_tile;

  __device__ __forceinline__ SplitProducer(const SplitParams& params, const SplitSequence& seq,
                                           const TileRange& tiles, int group)
      : params(params),
        seqlen_k(seq.seqlen_k),
        tiles(tiles, group),
        stages(ptx::smem_address(ptx::dynamic_smem()) + kMap.stages + group * kMap.group),
        first_row(this->tiles.first * kBlockN + GroupCopy::first_row()),
        first_chunk(GroupCopy::first_column() / kChunkElements),
        k_chunk(seq.k + first_row * params.k_stride.row + first_chunk),
        v_chunk(seq.v + first_row * params.v_stride.row + first_chunk),
        k_tile(kShape.key_groups * kBlockN * params.k_stride.row),
        v_tile(kShape.key_groups * kBlockN * params.v_stride.row) {}

  // Byte offset of a stage. The last tile's is stage 0, so that a group may leave its part of the
  // output in those behind it.
  __device__ __forceinline__ int stage_of(int i) const {
    return (tiles.count + kStages - 1 - i) % kStages * kStageBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress k(int stage) const {
    return stages + stage + kMap.tile;
  }
  __device__ __forceinline__ ptx::SmemAddress v(int stage) const { return stages + stage; }

  // Q, and all stages that are free.
  __device__ __forceinline__ void start(const SplitSequence& seq, int m0) const {
    BlockCopy::template ragged<kBlockM>(
        ptx::smem_address(ptx::dynamic_smem()) + kMap.q,
        chunk_at<T>(params.q, seq.q + (m0 + BlockCopy::first_row()) * params.q_stride.row +
                                  BlockCopy::first_column() / kChunkElements),
        params.q_stride.row * kChunkElements, seq.seqlen_q - m0, params.head_dim);
    start_k(0, stage_of(-1));
    ptx::cp_async_commit();
    for_each_slice([&](auto i) { start_stage(i, stage_of(i)); },
                   std::make_integer_sequence<int, kFirstStages>{});
  }

  // V of tile i and K of tile i + 1, as far as there are such tiles.
  __device__ __forceinline__ void start_stage(int i, int stage) const {
    start_v(i, stage);
    start_k(i + 1, stage);
    ptx::cp_async_commit();
  }

 private:
  __device__ __forceinline__ void start_k(int i, int stage) const {
    if (i >= tiles.count) return;
    GroupCopy::template ragged<kBlockN>(k(stage), chunk_at<T>(params.k, k_chunk - i * k_tile),
                                        params.k_stride.row * kChunkElements,
                                        seqlen_k - tiles.tile(i) * kBlockN, params.head_dim);
  }
  __device__ __forceinline__ void start_v(int i, int stage) const {
    if (i >= tiles.count) return;
    GroupCopy::template ragged<kBlockN>(v(stage), chunk_at<T>(params.v, v_chunk - i * v_tile),
                                        params.v_stride.row * kChunkElements,
                                        seqlen_k - tiles.tile(i) * kBlockN, params.head_dim_v);
  }
};

}  // namespace dlattn::wmma
