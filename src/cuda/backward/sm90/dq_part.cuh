#pragma once

#include "cuda/backward/sm90/setup.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/reduce_vector.cuh"
#include "cuda/ptx/tma.cuh"

namespace dlattn::backward_sm90 {

// A consumer's part of a step's dQ, on its way from accumulators to the sum in global memory: all
// threads leave their numbers in shared memory, in the order of registers, and one has the TMA add
// them, or another warp does (kIsSent, dq_sender.cuh). So no thread waits for additions.
template <int kHeadDim, bool kSoftcap, bool kIsSent = false>
struct DqPart {
  static constexpr int kNumbers =  // of a thread
      block_m(kHeadDim, kSoftcap) * kHeadDim / (kNumConsumers * kWarpgroupThreads);
  static constexpr int kBytes = kNumbers * kWarpgroupThreads * 4;

  const Shared<kHeadDim, kSoftcap>& shared;
  const int consumer;
  const unsigned use = 0;  // where another warp sends: the number of the tile of queries

  // Before a barrier of the consumer's threads, behind which they may leave the next step's part,
  // and before they end.
  __device__ __forceinline__ void wait_until_sent() const {
    if constexpr (!kIsSent) {
      if (thread() == 0) ptx::tma_store_wait_read();
    }
  }

  __device__ __forceinline__ void leave(const float (&acc)[kNumbers]) const {
    if constexpr (kIsSent) shared.dq_parts.wait_empty(kNumConsumers * use + consumer);
    auto* const to = reinterpret_cast<ptx::Float4*>(ptx::dynamic_smem() + offset()) + thread();
#pragma unroll
    for (int i = 0; i < kNumbers; i += 4)
      to[i / 4 * kWarpgroupThreads] = {acc[i], acc[i + 1], acc[i + 2], acc[i + 3]};
    ptx::fence_proxy_async();
  }

  // `tile_sum`: of both consumers' parts, one behind the other.
  __device__ __forceinline__ void send(float* tile_sum) const {
    if constexpr (kIsSent) {
      __syncwarp();
      if (thread() % 32 == 0) shared.dq_parts.end_fill(kNumConsumers * use + consumer);
      return;
    }
    ptx::barrier_sync(kDqBarrier + consumer, kWarpgroupThreads);
    if (thread() != 0) return;
    ptx::bulk_reduce_add(tile_sum + consumer * kNumbers * kWarpgroupThreads, shared.base + offset(),
                         kBytes);
    ptx::tma_store_commit();
  }

 private:
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(ptx::reread_thread_index()) % kWarpgroupThreads;
  }
  __device__ __forceinline__ int offset() const { return shared.kMap.dq + consumer * kBytes; }
};

}  // namespace dlattn::backward_sm90
