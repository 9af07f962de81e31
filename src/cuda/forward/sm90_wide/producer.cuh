#pragma once

#include "cuda/forward/sm90_wide/setup.cuh"
#include "cuda/ptx/tma.cuh"

namespace dlattn::sm90_wide {

// One thread for each consumer, which copies its stream: every other position, to both blocks of
// the cluster. It tells its own block's barriers of all positions: the other block copies the rest.
// The first consumer's copies the block's rows of Q, too.
template <int kTile>
struct Producer {
  const AttentionParams& params;
  const LaunchShape& shape;
  const KernelArgs& args;
  const Shared<kTile> shared;
  const int consumer;
  const Stream<kTile> stream = shared.stream(consumer);
  unsigned position = 0;

  __device__ __forceinline__ void run() {
    const tile::SequenceTile work = work_tile(params, shape);
    const TileWalk walk = walk_of(params, shape, work);
    if (consumer == 0) copy_queries(walk);
    const int head_kv = static_cast<int>(shape.heads_per_kv_head.quotient(work.head));
    const int count = walk.all.end - walk.all.begin;
    const auto at = [&](int i) {
      return ptx::BoxAt{0, (walk.all.end - 1 - i) * kBlockN, head_kv, work.batch};
    };
#pragma unroll 1
    for (int own = consumer; own <= count; own += kConsumers) {
      if (own < count) copy_keys(at(own));
      if (own > 0) copy_values(at(own - 1));
      if (own < count) copy_values(at(own));
    }
  }

 private:
  static constexpr int kKeySlots = key_slots(kTile), kHalf = half_of(kTile);
  static constexpr unsigned kAllBlocks = (1u << kClusterBlocks) - 1;

  __device__ __forceinline__ void copy_queries(const TileWalk& walk) const {
    ptx::mbarrier_arrive_expect_tx(shared.queries_full(), kKeySlots * kSlotBytes);
#pragma unroll 1
    for (int b = 0; b < kKeySlots; ++b) {
      ptx::tma_load(shared.q() + b * kSlotBytes, args.q, shared.queries_full(),
                    {b * kBlockColumns, walk.first_row, walk.work.head, walk.work.batch});
    }
  }

  // Whether this block copies the position, which is free now, and gets so many bytes.
  __device__ __forceinline__ bool begin_fill(int bytes) const {
    stream.wait_empty(position);
    ptx::mbarrier_arrive_expect_tx(stream.full(position), bytes);
    return static_cast<int>(position % kClusterBlocks) == rank_in_cluster();
  }

  __device__ __forceinline__ void copy_keys(ptx::BoxAt at) {
#pragma unroll 1
    for (int b = 0; b < kKeySlots; ++b, ++position, at.column += kBlockColumns) {
      if (!begin_fill(kSlotBytes)) continue;
      ptx::tma_load_to_blocks(stream.slot(position), args.k, stream.full(position), at, kAllBlocks);
    }
  }

  // The consumer's columns. Blocks of columns that V has not may be left as they are, as what they
  // give is no column of out; in the largest tile they are zeros, so that its code has no loop.
  __device__ __forceinline__ void copy_values(ptx::BoxAt at) {
    constexpr int kBlocks = kHalf / kBlockColumns;
    int blocks = kBlocks;
    if constexpr (kTile < kMostColumns) {
      const int columns = static_cast<int>(params.head_dim_v) - consumer * kHalf;
      blocks = min(max(columns + kBlockColumns - 1, 0) / kBlockColumns, kBlocks);
    }
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step, ++position, at.row += kStepKeys) {
      if (!begin_fill(blocks * kStepBlockBytes)) continue;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (b < blocks) copy_block(at, b);
      }
    }
  }

  __device__ __forceinline__ void copy_block(ptx::BoxAt at, int block) {
    at.column = consumer * kHalf + block * kBlockColumns;
    ptx::tma_load_to_blocks(stream.slot(position) + block * kStepBlockBytes, args.v,
                            stream.full(position), at, kAllBlocks);
  }
};

}  // namespace dlattn::sm90_wide
