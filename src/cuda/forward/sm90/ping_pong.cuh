#pragma once

#include "cuda/forward/sm90/traits.h"
#include "cuda/ptx/barrier.cuh"

// The named barriers of a thread block, and ping-pong scheduling of its consumers.
namespace dlattn::sm90 {

// The block's named barriers.
constexpr int kPingPongBarrier = 1;   // + consumer: it may start its products
constexpr int kWarpgroupBarrier = 8;  // + consumer: its own threads
constexpr int kPartsBarrier = 12;     // + row group: the two consumers that share its rows

// Ping-pong scheduling: consumer c starts its products of a tile after consumer c - 1 has, so that
// one's softmax runs while the other's products do. All consumers wait and pass equally often.
template <int kConsumers, bool kPingPong>
struct PingPong {
  int consumer;

  // Consumer 0 starts first.
  __device__ __forceinline__ void begin() const {
    if constexpr (kPingPong) {
      if (consumer == kConsumers - 1) pass();
    }
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (kPingPong) ptx::barrier_sync(kPingPongBarrier + consumer, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (kPingPong) {
      const int next = consumer == kConsumers - 1 ? 0 : consumer + 1;
      ptx::barrier_arrive(kPingPongBarrier + next, 2 * kWarpgroupThreads);
    }
  }
  // The arrival that is left over.
  __device__ __forceinline__ void end() const {
    if constexpr (kPingPong) {
      if (consumer == 0) wait();
    }
  }
};

}  // namespace dlattn::sm90
