#pragma once

#include "cuda/forward/sm90_wide/traits.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tensor_map.cuh"
#include "cuda/tile/varlen_scheduler.cuh"
#include "cuda/tile/wgmma/key_walk.cuh"

// Shared by producer and consumers: tensor maps, shared memory and the barriers between them.
namespace dlattn::sm90_wide {

using TileWalk = tile::wgmma::KeyWalk<kBlockM, kBlockN>;

// The arguments that a launch passes beside the parameters.
struct KernelArgs {
  // One box: 64 columns of 64 rows of q, of the keys of a tile, of those of a step of v.
  ptx::TensorMap q, k, v;
};

// The block's named barriers.
constexpr int kBothBarrier = 1;   // both consumers
constexpr int kReadyBarrier = 2;  // + consumer: its probabilities are there for the other one

// The block's rows of its cluster's work tile.
__device__ __forceinline__ int rank_in_cluster() {
  return static_cast<int>(blockIdx.x % kClusterBlocks);
}
__device__ __forceinline__ tile::SequenceTile work_tile(const AttentionParams& params,
                                                        const LaunchShape& shape) {
  return tile::fixed_lengths(params, tile::scheduled_tile(shape, blockIdx.x / kClusterBlocks));
}
__device__ __forceinline__ TileWalk walk_of(const AttentionParams& params, const LaunchShape& shape,
                                            const tile::SequenceTile& work) {
  return {work, tile::wgmma::position_mask(params, shape, work), rank_in_cluster()};
}

// The parts of K and V that a consumer reads come as a stream, through slots of its own that are
// used in turn: position i is in slot i % kSlots. For each of its own tiles come first that tile's
// keys, then, step by step, the values in its columns of the other consumer's tile before, then
// those of its own. A position has the same place in both blocks of the cluster: one copies it to
// both, when both have emptied it.
template <int kTile>
struct Stream {
  static constexpr int kSlots = num_slots(kTile);

  ptx::SmemAddress slots, mbarriers;  // full [kSlots], empty [kSlots]

  __device__ __forceinline__ ptx::SmemAddress slot(unsigned position) const {
    return slots + static_cast<int>(position % kSlots) * kSlotBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress full(unsigned position) const {
    return mbarriers + static_cast<int>(position % kSlots) * ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress empty(unsigned position) const {
    return full(position) + kSlots * ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ static int parity(unsigned position) {
    return static_cast<int>(position / kSlots % 2);
  }
  __device__ __forceinline__ void wait_full(unsigned position) const {
    ptx::mbarrier_sleep(full(position), parity(position));
  }
  // Until both blocks of the cluster have done with what was in the slot before.
  __device__ __forceinline__ void wait_empty(unsigned position) const {
    ptx::mbarrier_sleep(empty(position), parity(position) ^ 1);
  }
  // By a warp, to the producers of both blocks.
  __device__ __forceinline__ void release(unsigned position) const {
    const unsigned lane = threadIdx.x % 32;
    if (lane < kClusterBlocks) ptx::mbarrier_arrive_at_block(empty(position), lane);
  }
};

template <int kTile>
struct Shared {
  static constexpr SmemMap kMap = smem_map(kTile);
  static constexpr int kSlots = num_slots(kTile);

  ptx::SmemAddress base;

  __device__ __forceinline__ ptx::SmemAddress q() const { return base; }
  __device__ __forceinline__ ptx::SmemAddress probabilities(int consumer) const {
    return base + kMap.probabilities + consumer * kSlotBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress queries_full() const { return base + kMap.mbarriers; }
  __device__ __forceinline__ Stream<kTile> stream(int consumer) const {
    return {base + kMap.slots + consumer * kSlots * kSlotBytes,
            queries_full() + (1 + consumer * 2 * kSlots) * ptx::kMbarrierBytes};
  }

  // A consumer's row maxima, with its last tile, and its parts of the sums of probabilities.
  __device__ __forceinline__ static float* row_max(int consumer) {
    return reinterpret_cast<float*>(ptx::dynamic_smem() + kMap.row_max) + consumer * kRows;
  }
  __device__ __forceinline__ static float* row_sum(int consumer) {
    return reinterpret_cast<float*>(ptx::dynamic_smem() + kMap.row_sum) + consumer * kRows;
  }

  // By all threads of the cluster, before anything else.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(queries_full(), 1);
#pragma unroll 1
      for (int c = 0; c < kConsumers; ++c) {
        const Stream<kTile> keys_values = stream(c);
#pragma unroll 1
        for (unsigned i = 0; i < kSlots; ++i) {
          ptx::mbarrier_init(keys_values.full(i), 1);
          ptx::mbarrier_init(keys_values.empty(i), kClusterBlocks * kWarpgroupThreads / 32);
        }
      }
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
  }
};

}  // namespace dlattn::sm90_wide
