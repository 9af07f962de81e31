#pragma once

#include "cuda/tile/ring.cuh"

namespace dlattn::wmma {

// Stages that one thread has the copy engine fill, and each warp releases; and a warp's own rows of
// Q, with an mbarrier for each warp.
template <int kNumWarps, int kStages>
struct BulkStages {
  tile::Ring<kStages> ring;

  __device__ __forceinline__ explicit BulkStages(ptx::SmemAddress memory) : ring(memory) {
    if (threadIdx.x == 0) {
      ring.init(kNumWarps);
      for (int warp = 0; warp < kNumWarps; ++warp) ptx::mbarrier_init(query(warp), 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }
  // The mbarrier at which a warp's rows of Q arrive; one of its threads expects their bytes there.
  __device__ __forceinline__ ptx::SmemAddress query(int warp) const {
    return ring.full + ring.kBytes + warp * ptx::kMbarrierBytes;
  }
  // Until they have come there, for the `use`-th time from 0 on.
  __device__ __forceinline__ void wait_query(int warp, unsigned use) const {
    ptx::mbarrier_sleep(query(warp), static_cast<int>(use % 2));
  }
  // By one thread: waits until tile `i` may be copied to its stage. The mbarrier at which its bytes
  // are expected.
  __device__ __forceinline__ ptx::SmemAddress begin_fill(unsigned i, int bytes) const {
    return ring.begin_fill(i, bytes);
  }
  __device__ __forceinline__ void wait_full(unsigned i) const { ring.wait_full(i); }
  __device__ __forceinline__ void release(unsigned i, int lane) const {
    __syncwarp();
    if (lane == 0) ring.release(i);
  }
};

}  // namespace dlattn::wmma
