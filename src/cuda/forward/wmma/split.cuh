#pragma once

// Attention for small grids, by intra-CTA split: few query rows per thread block, so that there are
// blocks enough for all SMs, and the keys divided among the block's warps.
//
// A block computes block_m query rows of one head. Its warps form key_groups groups of row_groups
// warps; tile n of the visible keys belongs to group (end - 1 - n) mod key_groups, and a warp has
// 16 of the rows, with its group's share of the output in registers (SplitConsumer). Groups share Q
// and nothing else until the end: each copies its own tiles into its own ring of stages
// (SplitProducer). In a single pass over the keys a group has two tiles at most, whose copies all
// start before the first product.
// At the end every group leaves its part of the output in its stages and its rows' statistics
// behind them, and each warp merges 8 rows, half of the columns, in the order of the groups.
// Shared memory: SplitSmemMap. Barriers: a named one for each group, once a tile, which publishes
// its stage and frees the one before; the block's for Q and before the merge.

#include "cuda/forward/wmma/split_consumer.cuh"
#include "cuda/ptx/grid_dependency.cuh"

namespace dlattn::wmma {

template <typename T, int kHeadDim, int kVariant>
__global__ void __launch_bounds__(num_warps(split_shape(kHeadDim, kVariant == kSinglePass)) * 32,
                                  split_shape(kHeadDim, kVariant == kSinglePass).blocks_per_sm)
    split_kernel(const __grid_constant__ SplitParams params) {
  using Consumer = SplitConsumer<T, kHeadDim, kVariant>;
  const tile::WorkTile work = tile::scheduled_tile(params, blockIdx.x);
  const SplitSequence seq(params, work);
  if (work.m_block * Consumer::kBlockM >= seq.seqlen_q) return;
  const Consumer consumer(params, work, seq);
  ptx::wait_for_grids_ahead();
  // Where an SM has room for several blocks, the next grid's would crowd where it is free first.
  if (Consumer::kShape.blocks_per_sm == 1) ptx::let_next_grid_start();
  typename Consumer::Rows rows;
  consumer.run(rows);
}

}  // namespace dlattn::wmma
