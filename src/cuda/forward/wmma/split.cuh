#pragma once

// Attention for small grids: few query rows per thread block, so that there are blocks enough for
// all SMs, and the keys divided among the block's warps.
//
// A block computes block_m query rows of one head. Its warps form key_groups groups of row_groups
// warps; tile n of the visible keys belongs to group (end - 1 - n) mod key_groups, and a warp has
// 16 of the rows, with its group's share of the output in registers. Groups share Q and nothing
// else until the end: each copies its own tiles into its own ring of stages, and has a barrier of
// its own. Stage i holds V of the group's tile i and K of tile i + 1 (K of tile 0 comes alone, into
// the last stage). Per tile i:
//   1. wait for stage i, barrier, start the copy of a stage into the one before it, which is free;
//   2. probabilities of tile i and, between them, S of tile i + 1 = Q K^T;
//   3. O += P V of tile i;
//   4. mask on edge tiles and references for tile i + 1 (SpeculativeSoftmax).
// At the end every group leaves its part of the output in its stages and its rows' statistics
// behind them, and after the block's barrier each warp merges 8 rows, half of the columns, in the
// order of the groups. Where a shape is whole, a group has two tiles at most, whose copies all
// start before the first product. Shared memory: see SplitSmemMap.

#include "cuda/forward/wmma/copy.cuh"
#include "cuda/forward/wmma/merge.cuh"
#include "cuda/forward/wmma/products.cuh"
#include "cuda/forward/wmma/softmax.cuh"
#include "cuda/forward/wmma/split_params.h"
#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/forward/wmma/traits.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma {

// The tiles of a group, walked from the last to the first.
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

// tile::Sequence in chunks. Waits for the grids ahead where lengths are in memory.
struct SplitSequence {
  int seqlen_q;
  int seqlen_k;
  int shift;    // query i stands at key position i + shift
  int q, k, v;  // where its rows start

  __device__ __forceinline__ SplitSequence(const SplitParams& p, const tile::WorkTile& work) {
    const int head_kv = static_cast<int>(p.heads_per_kv_head.quotient(work.head));
    seqlen_q = p.seqlen_q;
    seqlen_k = p.seqlen_k;
    q = work.head * p.q_stride.head + work.batch * p.q_stride.batch;
    k = head_kv * p.k_stride.head + work.batch * p.k_stride.batch;
    v = head_kv * p.v_stride.head + work.batch * p.v_stride.batch;
    if (p.cu_seqlens_q) {
      ptx::wait_for_grids_ahead();
      const tile::SequenceRows queries = tile::query_rows(p, work.batch);
      const tile::SequenceRows keys = tile::key_rows(p, work.batch);
      seqlen_q = queries.count;
      seqlen_k = keys.count;
      q += queries.start * p.q_stride.row;
      k += keys.start * p.k_stride.row;
      v += keys.start * p.v_stride.row;
    }
    shift = position_shift(p.causal, seqlen_q, seqlen_k);
  }
};

// The address of a chunk.
template <typename T>
__device__ __forceinline__ const T* chunk_at(const void* gmem, int offset) {
  return static_cast<const T*>(gmem) + static_cast<std::int64_t>(offset) * kChunkElements;
}

template <typename T, int kHeadDim, int kVariant>
__global__ void __launch_bounds__(num_warps(split_shape(kHeadDim, kVariant == kWhole)) * 32,
                                  split_shape(kHeadDim, kVariant == kWhole).blocks_per_sm)
    split_kernel(const __grid_constant__ SplitParams params) {
  constexpr SplitShape kShape = split_shape(kHeadDim, kVariant == kWhole);
  constexpr SplitSmemMap kMap = split_smem_map(kHeadDim, kVariant == kWhole);
  constexpr int kBlockM = block_m(kShape);
  constexpr int kBlockN = kShape.block_n;
  constexpr int kRowTiles = kBlockM / (kShape.row_groups * 16);  // a warp's
  constexpr int kStages = kShape.stages;
  constexpr int kFirstStages = kShape.whole ? kStages : kStages - 1;  // copied at once
  static_assert(!kShape.whole || kStages == 2);
  constexpr int kStage = 2 * kMap.tile;  // bytes
  constexpr int kGroupThreads = kShape.row_groups * 32;
  constexpr int kNumThreads = kShape.key_groups * kGroupThreads;
  using GroupCopy = TileCopy<T, kHeadDim, kGroupThreads, true>;
  using BlockCopy = TileCopy<T, kHeadDim, kNumThreads>;

  const int group = threadIdx.x / kGroupThreads;
  const int row_group = threadIdx.x / 32 % kShape.row_groups;
  const int lane_idx = threadIdx.x % 32;
  const int warp_row = row_group * 16;
  const tile::WorkTile work = tile::scheduled_tile(params, blockIdx.x);
  const SplitSequence seq(params, work);
  const int m0 = work.m_block * kBlockM;
  if (m0 >= seq.seqlen_q) return;

  unsigned char* smem = ptx::dynamic_smem();
  const ptx::SmemAddress sQ = ptx::smem_address(smem) + kMap.q;
  const ptx::SmemAddress stages = ptx::smem_address(smem) + kMap.stages + group * kMap.group;
  const tile::Mask mask(params, seq.shift, seq.seqlen_k);
  const GroupTiles<kShape.key_groups> tiles(
      TileRange(mask, m0, min(m0 + kBlockM, seq.seqlen_q) - 1, kBlockN), group);

  // This thread's chunks of the first tiles, and from one tile to the next.
  const int first_row = tiles.first * kBlockN + GroupCopy::first_row();
  const int first_chunk = GroupCopy::first_column() / kChunkElements;
  const int k_chunk = seq.k + first_row * params.k_stride.row + first_chunk;
  const int v_chunk = seq.v + first_row * params.v_stride.row + first_chunk;
  const int k_tile = kShape.key_groups * kBlockN * params.k_stride.row;
  const int v_tile = kShape.key_groups * kBlockN * params.v_stride.row;
  const auto start_k = [&](int i, int stage) {
    if (i >= tiles.count) return;
    GroupCopy::template ragged<kBlockN>(stages + stage + kMap.tile,
                                        chunk_at<T>(params.k, k_chunk - i * k_tile),
                                        params.k_stride.row * kChunkElements,
                                        seq.seqlen_k - tiles.tile(i) * kBlockN, params.head_dim);
  };
  const auto start_v = [&](int i, int stage) {
    if (i >= tiles.count) return;
    GroupCopy::template ragged<kBlockN>(stages + stage, chunk_at<T>(params.v, v_chunk - i * v_tile),
                                        params.v_stride.row * kChunkElements,
                                        seq.seqlen_k - tiles.tile(i) * kBlockN, params.head_dim_v);
  };
  const auto start_stage = [&](int i, int stage) {
    start_v(i, stage);
    start_k(i + 1, stage);
    ptx::cp_async_commit();
  };
  ptx::wait_for_grids_ahead();
  // Where an SM has room for several blocks, the next grid's would crowd where it is free first.
  if (kShape.blocks_per_sm == 1) ptx::let_next_grid_start();
  BlockCopy::template ragged<kBlockM>(
      sQ,
      chunk_at<T>(params.q, seq.q + (m0 + BlockCopy::first_row()) * params.q_stride.row +
                                BlockCopy::first_column() / kChunkElements),
      params.q_stride.row * kChunkElements, seq.seqlen_q - m0, params.head_dim);
  // The last tile's stage is number 0, so that a part may be left in those behind it.
  const auto stage_of = [&](int i) { return (tiles.count + kStages - 1 - i) % kStages * kStage; };
  start_k(0, stage_of(-1));
  ptx::cp_async_commit();
  for_each_slice([&](auto i) { start_stage(i, stage_of(i)); },
                 std::make_integer_sequence<int, kFirstStages>{});

  // Where the results go, worked out while the copies are on their way.
  const tile::ResultRows<T> result(params, work);

  constexpr bool kBranches = kHeadDim <= 64 && !kShape.whole;  // registers are scarce
  SpeculativeSoftmax<kRowTiles> softmax;
  float acc_o[1][kHeadDim / 8][4] = {};
  std::uint32_t rQ[kHeadDim / 16][1][4];
  ptx::cp_async_wait<kFirstStages>();
  __syncthreads();
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16) {
    load_q<kHeadDim>(rQ[d / 16], sQ + warp_row * kHeadDim * 2 + lane_place_down<kHeadDim>(lane_idx),
                     d);
  }

  const auto multiply_k = [&](float (&acc_s)[1][kBlockN / 8][4], int stage) {
    multiply_qk<T, kHeadDim, 0, kBlockN>(
        acc_s, stages + stage + kMap.tile + lane_place_across<kHeadDim>(lane_idx),
        [&](std::uint32_t (&a)[1][4], int d) { memcpy(a, rQ[d / 16], sizeof a); });
  };
  const auto multiply_v = [&](const std::uint32_t (&rP)[1][kBlockN / 16][4], int stage) {
    multiply_pv<T, kHeadDim, 0, kBlockN>(acc_o, rP,
                                         stages + stage + lane_place_down<kHeadDim>(lane_idx));
  };
  const auto hide_unseen = [&](float (&acc_s)[1][kBlockN / 8][4], int i) {
    const int n0 = tiles.tile(i) * kBlockN, row = m0 + warp_row;
    if (!tile::contains_all(mask.every_row(row, row + 15), n0, kBlockN))
      apply_mask(acc_s, mask, row + lane_idx / 4, n0, lane_idx);
  };
  std::uint32_t rP[1][kBlockN / 16][4];
  if (tiles.count > 0) {
    float acc_s[1][kBlockN / 8][4];
    multiply_k(acc_s, stage_of(-1));
    hide_unseen(acc_s, 0);
    softmax.template set_references<0, kBlockN>(acc_s, params.scale_log2);
    int stage = stage_of(0), free = stage_of(-1);
#pragma unroll 1
    for (int i = 0; i < tiles.count - 1; ++i) {
      ptx::cp_async_wait<kFirstStages - 1>();
      ptx::barrier_sync(1 + group, kGroupThreads);
      if constexpr (!kShape.whole) start_stage(i + kStages - 1, free);
      softmax.template safe_probabilities<T, 0, kBlockN, kBranches>(acc_s, params.scale_log2, rP);
      float next_s[1][kBlockN / 8][4];
      multiply_k(next_s, stage);
      multiply_v(rP, stage);
      hide_unseen(next_s, i + 1);
      softmax.template raise_references<0, kBlockN>(next_s, params.scale_log2, false, acc_o);
      memcpy(acc_s, next_s, sizeof acc_s);
      if constexpr (kShape.whole) break;  // there are two tiles at most
      free = stage;
      stage = stage == 0 ? (kStages - 1) * kStage : stage - kStage;
    }
    softmax.template safe_probabilities<T, 0, kBlockN, kBranches>(acc_s, params.scale_log2, rP);
  }

  constexpr int kGroups = kShape.key_groups;
  PartStats* stats =
      reinterpret_cast<PartStats*>(smem + kMap.stats) + (warp_row + lane_idx / 4) * kGroups;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const tile::OnlineSoftmax row = softmax.scaled_row(0, h, params.scale_log2);
    if (lane_idx % 4 == 0) stats[8 * h * kGroups + group] = {row.row_max, row.row_sum};
  }
  if (tiles.count > 0) {
    ptx::cp_async_wait<0>();
    ptx::barrier_sync(1 + group, kGroupThreads);
    multiply_v(rP, 0);
  }
  softmax.scale_rows(params.scale_log2, acc_o);

  constexpr int kPart = kBlockM * kHeadDim * 4;  // bytes
  constexpr int kPartOffset = kPart <= kMap.group - kStage ? kStage : 0;
  static_assert(kPart <= kMap.group);
  // Where a part reaches into the last stage, another warp of the group may still read V there.
  if (kPartOffset == 0) ptx::barrier_sync(1 + group, kGroupThreads);
  const auto part = [&](int of_group) {
    return reinterpret_cast<PartPair*>(smem + kMap.stages + of_group * kMap.group + kPartOffset) +
           row_group * 2 * kPartPairs<kHeadDim>;
  };
  store_part<kHeadDim>(part(group), acc_o[0], lane_idx);
  __syncthreads();

  // A warp merges 8 rows of its row group.
  constexpr int kShares = kGroups / 2;  // of the columns
  constexpr int kPairs = kPartPairs<kHeadDim> / kShares;
  static_assert(kPartPairs<kHeadDim> % kShares == 0);
  const int h = group % 2, share = group / 2, column = share * kPairs * 16;
  const RowParts<kGroups, kPairs> parts(part(0) + h * kPartPairs<kHeadDim> + share * kPairs,
                                        kMap.group, lane_idx);
  const RowMerge<kGroups> merge(stats + 8 * h * kGroups, result.sink);
  const int row = m0 + warp_row + 8 * h + lane_idx / 4;
  if (row >= result.seqlen_q) return;
  if (result.lse && share == 0 && lane_idx % 4 == 0)
    result.lse[row] = merge.finalize(result.sink).lse;
  parts.store(result.out + row * params.out.row_stride + column, merge, params.head_dim_v - column,
              params.store_bytes, lane_idx);
}

}  // namespace dlattn::wmma
