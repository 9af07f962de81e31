#pragma once

#include "cuda/backward/sm90/setup.cuh"
#include "cuda/ptx/counter.cuh"

// Sums of dQ in a fixed order: thread blocks add to a tile of queries one after another, those of
// the last keys first. Each tile has a semaphore, a counter in the workspace: the blocks of keys
// that have had their turn.
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
// The barriers "turn" and "passed" are those of Shared::may_add, a stage of which is full while the
// block has its turn. Where these warps bring bias and mask too, they do this between tiles
// (score_tiles.cuh).
namespace dlattn::backward_sm90 {

// By one lane of warp 1 and one of warp 2. The tile of a use is computed anew from its number:
// these warps have few registers.
template <typename SharedMemory>
struct DqSemaphore {
  const Problem& problem;
  const SharedMemory& shared;

  __device__ __forceinline__ unsigned* counter(const QueryTile& tile) const {
    const std::int64_t row = shared.work().head_row(problem, tile);
    return problem.semaphores + static_cast<std::uint64_t>(row) / SharedMemory::kBlockM + tile.m;
  }
  // Where the block stands among those of a head, the last keys first.
  __device__ __forceinline__ unsigned turn() const {
    const auto block = static_cast<unsigned>(shared.work().n0) / SharedMemory::kBlockN;
    return problem.num_m_blocks.divisor() - 1 - block;
  }

  // Lets consumers add when the block of the keys behind has done so.
  __device__ __forceinline__ void wait(unsigned use) const {
    const auto& work = shared.work();
    const QueryTile tile = work.query_tile(problem, use);
    const int first = work.n0 + SharedMemory::kBlockN;
    const Range<int> before = work.tiles_of_keys(first, work.last_key(first));
    shared.may_add.wait_empty(use);
    if (dlattn::contains(before, tile.m)) ptx::wait_for_counter(counter(tile), turn());
    shared.may_add.end_fill(use);
  }
  // Lets the next block add.
  __device__ __forceinline__ void pass(unsigned use) const {
    unsigned* const own = counter(shared.work().query_tile(problem, use));
    shared.wait_added(use);
    ptx::raise_counter(own, turn() + 1);
    shared.may_add.release(use);
  }
};

// By all lanes of the idle warps, where they have nothing else to do.
template <typename SharedMemory>
__device__ __forceinline__ void walk_semaphore(const Problem& p, const SharedMemory& shared) {
  const DqSemaphore<SharedMemory> semaphore = {p, shared};
  const unsigned tiles = shared.work().num_tiles(p);
  if (threadIdx.x == 32) {
#pragma unroll 1
    for (unsigned use = 0; use < tiles; ++use) semaphore.wait(use);
  }
  if (threadIdx.x == 64) {
#pragma unroll 1
    for (unsigned use = 0; use < tiles; ++use) semaphore.pass(use);
  }
}

}  // namespace dlattn::backward_sm90
