#pragma once

#include "cuda/forward/wmma/traits.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"

// How the warps of a block agree on the stages of K and V. Tiles are counted in the order of the
// walk from 0 on; tile i lies in stage i % kStages.
namespace dlattn::wmma {

constexpr int kTileBarrier = 1;
static_assert(kMbarrierBytes == ptx::kMbarrierBytes);

// Of a shape, in the code that is being compiled. Compute capabilities 8.0, 9.0 and 10.x have
// tensor cores several times as fast as others, beside which an mbarrier's instructions are felt.
// DLATTN_FAST_TENSOR_CORES is for tests of that code elsewhere.
constexpr Handover resolved(Handover handover) {
#if defined(__CUDA_ARCH__)
  constexpr bool kFast = __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200);
#elif defined(DLATTN_FAST_TENSOR_CORES)
  constexpr bool kFast = true;
#else
  constexpr bool kFast = false;
#endif
  if (handover != Handover::kMbarrierIfSlow) return handover;
  return kFast ? Handover::kBlockBarrier : Handover::kMbarrier;
}

template <int kNumWarps, Handover kHandover, int kStages>
struct Stages;

// One barrier of the block a tile: when it opens, the tile has landed and the stage of the tile
// before, of two, is free.
template <int kNumWarps>
struct Stages<kNumWarps, Handover::kBlockBarrier, 2> {
  __device__ __forceinline__ explicit Stages(ptx::SmemAddress) {}
  // By all threads, after they have started the copies of tile `i`, or stored it themselves.
  __device__ __forceinline__ void publish(int, bool = true) const { ptx::cp_async_commit(); }
  // In place of that where there is no such tile.
  __device__ __forceinline__ void skip() const { ptx::cp_async_commit(); }
  static constexpr int kGroups = 1;  // of copies that a tile is
  // Until tile `i` has landed. kLater: groups of this thread's copies that are younger.
  template <int kLater = 0>
  __device__ __forceinline__ void wait_full(int) const {
    ptx::cp_async_wait<kLater>();
    ptx::barrier_sync(kTileBarrier, kNumWarps * 32);  // warps come to it from different loops
  }
  // Until the stage of tile `i` may be overwritten.
  __device__ __forceinline__ void wait_empty(int) const {}
  // By all lanes of a warp that has read tile `i`.
  __device__ __forceinline__ void release(int, int) const {}
};

// Two mbarriers a stage, "full" and "empty": a warp may run ahead of the others by the better part
// of a tile where there are two stages, by more where there are more.
template <int kNumWarps, int kStages>
struct Stages<kNumWarps, Handover::kMbarrier, kStages> {
  ptx::SmemAddress mbarriers;  // full, empty of stage 0, then of stage 1 and so on

  __device__ __forceinline__ explicit Stages(ptx::SmemAddress memory) : mbarriers(memory) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        ptx::mbarrier_init(full(stage), kNumWarps * 32);
        ptx::mbarrier_init(empty(stage), kNumWarps);
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ void publish(unsigned i, bool copied = true) const {
    if (copied) {
      ptx::mbarrier_arrive_after_copies(full(i));
    } else {
      ptx::mbarrier_arrive(full(i));
    }
  }
  __device__ __forceinline__ void skip() const {}
  static constexpr int kGroups = 0;
  template <int kLater = 0>
  __device__ __forceinline__ void wait_full(unsigned i) const {
    ptx::mbarrier_wait(full(i), i / kStages % 2);
  }
  __device__ __forceinline__ void wait_empty(unsigned i) const {
    ptx::mbarrier_wait(empty(i), i / kStages % 2);
  }
  __device__ __forceinline__ void release(unsigned i, int lane) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty(i));
  }

 private:
  __device__ __forceinline__ ptx::SmemAddress full(unsigned i) const {
    return mbarriers + i % kStages * 2 * ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress empty(unsigned i) const {
    return full(i) + ptx::kMbarrierBytes;
  }
};

}  // namespace dlattn::wmma
