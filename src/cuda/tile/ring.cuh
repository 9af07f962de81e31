#pragma once

#include "cuda/ptx/mbarrier.cuh"

namespace dlattn::tile {

// Buffers that a producer fills and consumers empty in turn, by the number of their use: use i is
// in stage i % kStages.
template <int kStages>
struct Ring {
  static_assert((kStages & (kStages - 1)) == 0, "stages are told apart by a few bits");
  static constexpr int kBytes = 2 * kStages * ptx::kMbarrierBytes;

  ptx::SmemAddress full, empty;  // kStages mbarriers each

  __device__ __forceinline__ explicit Ring(ptx::SmemAddress mbarriers)
      : full(mbarriers), empty(mbarriers + kStages * ptx::kMbarrierBytes) {}

  // By one thread. `releases`: arrivals that make a stage empty; `fills`: those that make it full.
  __device__ __forceinline__ void init(int releases, int fills = 1) const {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full + i * ptx::kMbarrierBytes, fills);
      ptx::mbarrier_init(empty + i * ptx::kMbarrierBytes, releases);
    }
  }

  __device__ __forceinline__ static int stage(unsigned use) {
    return static_cast<int>(use % kStages);
  }

  // The producer's side: waits until the use before is over, and expects the bytes of this one.
  __device__ __forceinline__ void wait_empty(unsigned use) const {
    ptx::mbarrier_sleep(empty + stage(use) * ptx::kMbarrierBytes,
                        static_cast<int>(use / kStages % 2 ^ 1));
  }
  __device__ __forceinline__ ptx::SmemAddress begin_fill(unsigned use, int bytes) const {
    wait_empty(use);
    const ptx::SmemAddress mbarrier = full + stage(use) * ptx::kMbarrierBytes;
    ptx::mbarrier_arrive_expect_tx(mbarrier, bytes);
    return mbarrier;
  }
  __device__ __forceinline__ ptx::SmemAddress full_barrier(unsigned use) const {
    return full + stage(use) * ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress empty_barrier(unsigned use) const {
    return empty + stage(use) * ptx::kMbarrierBytes;
  }
  // For producers that write the stage themselves.
  __device__ __forceinline__ void end_fill(unsigned use) const {
    ptx::mbarrier_arrive(full + stage(use) * ptx::kMbarrierBytes);
  }

  // The consumers' side.
  __device__ __forceinline__ void wait_full(unsigned use) const {
    ptx::mbarrier_sleep(full + stage(use) * ptx::kMbarrierBytes,
                        static_cast<int>(use / kStages % 2));
  }
  __device__ __forceinline__ void release(unsigned use) const {
    ptx::mbarrier_arrive(empty + stage(use) * ptx::kMbarrierBytes);
  }
};

}  // namespace dlattn::tile
