#pragma once

#include "cuda/backward/sm90/dq_part.cuh"
#include "cuda/backward/sm90/setup.cuh"
#include "cuda/ptx/bulk_store.cuh"
#include "cuda/ptx/counter.cuh"
#include "cuda/ptx/tma.cuh"

// Sums of dQ that nobody has to clear. Each tile of queries has a counter in the workspace: the
// blocks that have claimed the tile, and from kFirstIsStored on whether the first of them has
// stored its part. The first one stores it, the others wait for that and add theirs. A tile
// that nobody has claimed sees no keys: `convert` stores zeros for it.
//
// One lane of each of two idle warps of the producer's warpgroup does this, so that consumers have
// none of the latencies of global memory:
//
//   warp 2      claim tile i + 1, wait for its first part  |claimed(i + 1)    claim tile i + 2
//   warp 1                     |claimed(i) |parts(i)  store or add both parts |sent(i)
//   consumers          dQ(i) to smem |parts(i)             ...
//
// A block that has claimed a tile first waits for nobody before it stores its part: so those that
// wait for it get it, however few blocks run at a time.
namespace dlattn::backward_sm90 {

constexpr unsigned kFirstIsStored = 1u << 24;

template <int kHeadDim, bool kSoftcap>
struct DqSender {
  using Memory = Shared<kHeadDim, kSoftcap>;
  static constexpr int kPartBytes = DqPart<kHeadDim, kSoftcap, true>::kBytes;

  const Problem& problem;
  const Memory& shared;

  // By all lanes of the idle warps.
  __device__ __forceinline__ void run() const {
    if (!problem.dq_sum) return;
    if (threadIdx.x == 32) send();
    if (threadIdx.x == 64) claim();
  }

 private:
  __device__ __forceinline__ std::int64_t first_row(const QueryTile& tile) const {
    return shared.work().head_row(problem, tile) + tile.m * Memory::kBlockM;
  }
  __device__ __forceinline__ unsigned* counter(const QueryTile& tile) const {
    return problem.dq_counters + static_cast<std::uint64_t>(first_row(tile)) / Memory::kBlockM;
  }

  // A tile ahead of warp 1. The counter is acquired where the block is not the first.
  __device__ __forceinline__ void claim() const {
    const unsigned tiles = shared.work().num_tiles(problem);
#pragma unroll 1
    for (unsigned use = 0; use < tiles; ++use) {
      unsigned* const own = counter(shared.work().query_tile(problem, use));
      shared.dq_claims.wait_empty(use);
      const bool is_first = ptx::take_ticket(own) % kFirstIsStored == 0;
      if (!is_first) ptx::wait_for_counter(own, kFirstIsStored);
      shared.is_first() = is_first;
      shared.dq_claims.end_fill(use);
    }
  }

  __device__ __forceinline__ void send() const {
    const unsigned tiles = shared.work().num_tiles(problem);
#pragma unroll 1
    for (unsigned use = 0; use < tiles; ++use) {
      const QueryTile tile = shared.work().query_tile(problem, use);
      shared.dq_claims.wait_full(use);
      const bool is_first = shared.is_first();
      shared.dq_claims.release(use);
      if (!is_first) ptx::fence_proxy_async_global();
#pragma unroll 1
      for (int part = 0; part < kNumConsumers; ++part) {
        shared.dq_parts.wait_full(kNumConsumers * use + part);
        send_part(part, tile, is_first);
      }
      ptx::tma_store_commit();
      ptx::tma_store_wait_read();
#pragma unroll
      for (int part = 0; part < kNumConsumers; ++part)
        shared.dq_parts.release(kNumConsumers * use + part);
      if (is_first) {
        ptx::tma_store_wait();
        ptx::raise_counter_by(counter(tile), kFirstIsStored);
      }
    }
  }

  __device__ __forceinline__ void send_part(int part, const QueryTile& tile, bool is_first) const {
    float* const to = problem.dq_sum + first_row(tile) * kHeadDim + part * (kPartBytes / 4);
    const ptx::SmemAddress from = shared.base + Memory::kMap.dq + part * kPartBytes;
    if (is_first) {
      ptx::bulk_store(to, from, kPartBytes);
    } else {
      ptx::bulk_reduce_add(to, from, kPartBytes);
    }
  }
};

}  // namespace dlattn::backward_sm90
