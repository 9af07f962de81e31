#pragma once

#include <cstring>

#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::sm90_latent {

// How the two blocks of a cluster join their parts of a row block. Each thread keeps one of two
// neighbouring rows and gives the other one to the same thread of the other block, which gives this
// one's: the first block keeps the first. What is given comes, 16 bytes at a time, to memory of
// keys, of which there are no more, as a part is all that either block has.
template <int kThreads>
struct Exchange {
  int thread;                // of kThreads
  int offset;                // into dynamic shared memory: where what is given comes
  ptx::SmemAddress ready;    // mbarrier: the other block has no more use for that memory
  ptx::SmemAddress brought;  // mbarrier: the other block's part is there

  __device__ __forceinline__ static int rank() { return static_cast<int>(blockIdx.x % 2); }
  __device__ __forceinline__ static float kept(float first, float second) {
    return rank() == 0 ? first : second;
  }
  __device__ __forceinline__ static float given(float first, float second) {
    return rank() == 0 ? second : first;
  }

  // By whole warps, all of both blocks. `chunks`: how many each thread of the warp gets.
  __device__ __forceinline__ void begin(int chunks) const {
    if (threadIdx.x % 32 > 0) return;
    ptx::mbarrier_arrive_expect_tx(brought, 32 * chunks * kChunkBytes);
    ptx::mbarrier_arrive_at_block(ready, 1 - rank());
  }
  __device__ __forceinline__ void wait_ready() const { ptx::mbarrier_sleep(ready, 0); }
  __device__ __forceinline__ void wait_brought() const { ptx::mbarrier_sleep(brought, 0); }

  __device__ __forceinline__ void give(int chunk, const float (&x)[4]) const {
    std::uint32_t bits[4];
    memcpy(bits, x, sizeof bits);
    ptx::store_at_block(ptx::smem_address(ptx::dynamic_smem()) + at(chunk), bits, brought,
                        1 - rank());
  }
  __device__ __forceinline__ void get(int chunk, float (&x)[4]) const {
    tile::load(x, reinterpret_cast<const float*>(ptx::dynamic_smem() + at(chunk)));
  }

 private:
  static constexpr int kChunkBytes = 16;
  __device__ __forceinline__ int at(int chunk) const {
    return offset + (chunk * kThreads + thread) * kChunkBytes;
  }
};

}  // namespace dlattn::sm90_latent
