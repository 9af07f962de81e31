#pragma once

#include "cuda/ptx/mbarrier.cuh"

namespace dlattn::tile {

// Whether the code that is being compiled is for tensor cores several times as fast as others:
// those of compute capabilities 8.0, 9.0 and 10.x, beside which an mbarrier's instructions cost
// time. DLATTN_FAST_TENSOR_CORES is for tests of that code elsewhere; DLATTN_CODE_OF_89 says that
// PTX for 8.0 becomes machine code for 8.9 too (cuda/CMakeLists.txt).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800 && defined(DLATTN_CODE_OF_89)
constexpr bool kFastTensorCores = false;
#elif defined(__CUDA_ARCH__)
constexpr bool kFastTensorCores =
    __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200);
#elif defined(DLATTN_FAST_TENSOR_CORES)
constexpr bool kFastTensorCores = true;
#else
constexpr bool kFastTensorCores = false;
#endif

// Two mbarriers per stage, "full" and "empty", by which warps hand tiles of K and V over to each
// other and may be the better part of a tile apart. Tiles are counted from 0 in the order of the
// walk; tile i is in stage i % kStages.
template <int kNumWarps, int kStages>
struct MbarrierStages {
  ptx::SmemAddress mbarriers;

  // By one thread, before a barrier of the block.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full(stage), kNumWarps * 32);
      ptx::mbarrier_init(empty(stage), kNumWarps);
    }
  }
  // All threads call it after they have started the copies of tile i (`copied`), or stored it.
  __device__ __forceinline__ void publish(unsigned i, bool copied) const {
    if (copied) {
      ptx::mbarrier_arrive_after_copies(full(i));
    } else {
      ptx::mbarrier_arrive(full(i));
    }
  }
  // Waits until tile i has landed.
  __device__ __forceinline__ void wait_full(unsigned i) const {
    ptx::mbarrier_wait(full(i), i / kStages % 2);
  }
  // Waits until all warps have released tile i.
  __device__ __forceinline__ void wait_empty(unsigned i) const {
    ptx::mbarrier_wait(empty(i), i / kStages % 2);
  }
  // All lanes of a warp call it after the warp has read tile i.
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

}  // namespace dlattn::tile
