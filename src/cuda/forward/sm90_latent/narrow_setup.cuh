#pragma once

#include "cuda/forward/sm90_latent/setup.cuh"

// Shared memory and barriers of the narrow shapes, between the warp that copies and the consumer.
namespace dlattn::sm90_latent {

// The block's named barriers.
constexpr int kNarrowBarrier = 1;       // + consumer: its own threads
constexpr int kEveryNarrowBarrier = 3;  // all consumers

// Blocks of columns come one behind the other to slots of a ring, nine for each tile, and are used
// and freed tile by tile.
// kKeyBytes: of an element of theirs.
template <int kRows, int kKeyBytes>
struct Ring {
  static constexpr NarrowMap kMap = narrow_map(kRows, kKeyBytes);
  static constexpr int kSlots = kMap.num_slots;
  static_assert(kSlots > kBlocks, "copies go on while a tile is in use");

  // Where a block of columns is, and the parity of its slot's use.
  struct Place {
    int slot = 0, parity = 0;
    // At most all slots further.
    __device__ __forceinline__ void advance(int count = 1) {
      slot += count;
      if (slot >= kSlots) slot -= kSlots, parity ^= 1;
    }
  };

  ptx::SmemAddress base;

  __device__ __forceinline__ ptx::SmemAddress q(int block) const {
    return base + block * kRows * kBlockRowBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress keys(const Place& at) const {
    return base + kMap.slots + at.slot * kMap.block_bytes;
  }
  __device__ __forceinline__ ptx::SmemAddress probabilities(int consumer) const {
    return base + kMap.probabilities + consumer * kRows * kBlockRowBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress full(int slot) const {
    return base + kMap.full + slot * ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress empty(int slot) const {
    return base + kMap.empty + slot * ptx::kMbarrierBytes;
  }
  // As Shared's.
  __device__ __forceinline__ ptx::SmemAddress join_ready() const { return base + kMap.join; }
  __device__ __forceinline__ ptx::SmemAddress joined() const {
    return base + kMap.join + ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ void wait_full(const Place& at) const {
    ptx::mbarrier_sleep(full(at.slot), at.parity);
  }
  // Until the use before is over.
  __device__ __forceinline__ void wait_empty(const Place& at) const {
    ptx::mbarrier_sleep(empty(at.slot), at.parity ^ 1);
  }

  // A number of each row from each warp of a consumer: the maxima of a tile, and what else rows
  // have one of, of which `use` tells those that are there at one time apart.
  __device__ __forceinline__ static float* of_rows(int consumer, int warp, int use = 0) {
    return reinterpret_cast<float*>(ptx::dynamic_smem() + kMap.of_rows) +
           ((consumer * 2 + use) * kNarrowWarps + warp) * kRows;
  }

  // A factor of each row's products with keys of 8 bits.
  __device__ __forceinline__ static float* factors() {
    return reinterpret_cast<float*>(ptx::dynamic_smem() + kMap.factors);
  }

  // By all threads of the cluster, before anything else.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int i = 0; i < kSlots; ++i) {
        ptx::mbarrier_init(full(i), 1);
        ptx::mbarrier_init(empty(i), kNarrowWarps);
      }
      ptx::mbarrier_init(join_ready(), kNarrowWarps);
      ptx::mbarrier_init(joined(), kNarrowWarps);
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
  }
};

}  // namespace dlattn::sm90_latent
