#pragma once

#include "cuda/backward/sm90/setup.cuh"
#include "cuda/ptx/counter.cuh"

// Sums of dQ in a fixed order: thread blocks add to a tile of queries in turns, those of the last
// keys first. Each tile has a counter in the workspace, of the blocks of keys whose turns are over.
//
// Blocks are numbered by tickets, in the order in which they start, and a turn only comes after
// those of lower tickets: so a block waits for blocks alone that have started, however few run at a
// time. From the last keys on, and upwards through the queries, blocks under causality reach a tile
// one after another by themselves: each begins with the tile that the one before leaves.
//
// Two warps of the producer's warpgroup have the latencies of global memory, and not the consumers:
//
//   warp 1      wait for the counter of tile i + 1     |turn        wait for ...
//   consumers                     |turn(i) add dQ(i) |added
//   warp 2                                           |added(i)  raise the counter of i |passed
//
// The barriers "turn" and "passed" are those of Shared::turns, a stage of which is full while the
// block has its turn.
namespace dlattn::backward_sm90 {

// Calls step(use, counter, m) for each tile of queries that the block walks, with the tile's
// counter.
template <int kHeadDim, bool kSoftcap, typename Step>
__device__ __forceinline__ void walk_turns(const Problem& p,
                                           const Shared<kHeadDim, kSoftcap>& shared, Step step) {
  const auto& work = shared.work();
  const int begin = work.tiles.begin, end = work.tiles.end;
  unsigned* counters = p.turns + static_cast<std::uint64_t>(work.first_row) / shared.kBlockM;
  unsigned use = 0;
#pragma unroll 1
  for (int h = 0; h < p.heads_per_kv_head; ++h) {
#pragma unroll 1
    for (int m = begin; m < end; ++m, ++use) step(use, counters + m, m);
    counters += static_cast<std::uint64_t>(p.padded_rows) / shared.kBlockM;
  }
}

// Where the block stands among those of a head, the last keys first.
template <int kHeadDim, bool kSoftcap>
__device__ __forceinline__ unsigned turn_of(const Problem& p,
                                            const Shared<kHeadDim, kSoftcap>& shared) {
  const auto block = static_cast<unsigned>(shared.work().n0) / shared.kBlockN;
  return p.num_m_blocks.divisor() - 1 - block;
}

// Warp 1, one lane of it: lets consumers add when the block of the keys behind has done so.
template <int kHeadDim, bool kSoftcap>
__device__ __forceinline__ void wait_for_turns(const Problem& p,
                                               const Shared<kHeadDim, kSoftcap>& shared) {
  const auto& work = shared.work();
  const int first = work.n0 + shared.kBlockN;
  const tile::Range before = work.tiles_of_keys(first, work.last_key(first));
  const unsigned turn = turn_of(p, shared);
  walk_turns(p, shared, [&](unsigned use, const unsigned* counter, int m) {
    shared.turns.wait_empty(use);
    if (tile::contains(before, m)) ptx::wait_for_counter(counter, turn);
    shared.turns.end_fill(use);
  });
}

// Warp 2, one lane of it: lets the next block add.
template <int kHeadDim, bool kSoftcap>
__device__ __forceinline__ void pass_turns(const Problem& p,
                                           const Shared<kHeadDim, kSoftcap>& shared) {
  const unsigned turn = turn_of(p, shared);
  walk_turns(p, shared, [&](unsigned use, unsigned* counter, int) {
    shared.wait_added(use);
    ptx::raise_counter(counter, turn + 1);
    shared.turns.release(use);
  });
}

}  // namespace dlattn::backward_sm90
