#pragma once

#include "cuda/forward/sm90_latent/traits.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tensor_map.cuh"
#include "cuda/tile/key_parts/schedule.cuh"

// Shared by producer and consumers: the tensor map, shared memory and the barriers between them.
namespace dlattn::sm90_latent {

using Schedule = DecodeSchedule<kBlockM, kBlockN, true>;

// The thread block's work, as consumers take it: `take`, of a segment, the mask of its sequence's
// keys, the rows that the sequence has of a KV head, and whether the part is to be joined.
template <typename Take>
__device__ __forceinline__ void for_each_segment(const AttentionParams& params,
                                                 const DecodeShape& shape, Take take) {
  Schedule units(params, shape);
  for (;;) {
    const Segment segment = units.next();
    if (segment.is_none()) break;
    const Lengths lengths(params, segment.sequence);
    take(segment, lengths.mask(params, shape), lengths.rows(shape), units.joined());
  }
}

// The arguments that a launch passes beside the parameters.
struct KernelArgs {
  ptx::TensorMap k;  // one box: 64 columns of keys of a page
  int page_rows;
};

// The block's named barriers.
constexpr int kBothBarrier = 1;   // both consumers
constexpr int kReadyBarrier = 2;  // + consumer: its probabilities are there for the other one
constexpr int kOwnBarrier = 4;    // + consumer: its own threads

// Use i of the stages is a tile of consumer i % 2: that one computes its probabilities, which are
// in the stage's rest block then, and both add up its values, half of the columns each. Columns
// arrive block by block, as products want them. Each consumer frees those that it has values of,
// and the one that reads the probabilities the rest block.
struct Shared {
  static constexpr SmemMap kMap = smem_map();
  static_assert(kStages == kConsumers, "a stage is always of the same consumer's tiles");

  ptx::SmemAddress base;

  // The consumer whose tile it is, which tells the stage.
  __device__ __forceinline__ static int owner(unsigned use) {
    return static_cast<int>(use % kStages);
  }
  __device__ __forceinline__ static int parity(unsigned use) {
    return static_cast<int>(use / kStages % 2);
  }
  // The consumer that frees a block of columns.
  __device__ __forceinline__ static int user(int owner, int block) {
    return block < kRestBlock ? block / kOwnBlocks : 1 - owner;
  }
  __device__ __forceinline__ ptx::SmemAddress q() const { return base; }
  __device__ __forceinline__ ptx::SmemAddress block(int owner, int block) const {
    return base + kMap.stages + owner * kTileBytes + block * kBlockBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress full(int owner, int block) const {
    return base + kMap.full + (owner * kBlocks + block) * ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress empty(int owner, int consumer) const {
    return base + kMap.empty + (owner * kConsumers + consumer) * ptx::kMbarrierBytes;
  }
  // The cluster's other block has no more use for its stages; has brought its part to these.
  __device__ __forceinline__ ptx::SmemAddress join_ready() const { return base + kMap.join; }
  __device__ __forceinline__ ptx::SmemAddress joined() const {
    return base + kMap.join + ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ void wait_full(int owner, unsigned use, int block) const {
    ptx::mbarrier_sleep(full(owner, block), parity(use));
  }
  // Until the use before is over.
  __device__ __forceinline__ void wait_empty(int owner, unsigned use, int consumer) const {
    ptx::mbarrier_sleep(empty(owner, consumer), parity(use) ^ 1);
  }

  // A consumer's row maxima, with its last tile, and its parts of the sums of probabilities.
  __device__ __forceinline__ static float* row_max(int consumer) {
    return reinterpret_cast<float*>(ptx::dynamic_smem() + kMap.row_max) + consumer * kBlockM;
  }
  __device__ __forceinline__ static float* row_sum(int consumer) {
    return reinterpret_cast<float*>(ptx::dynamic_smem() + kMap.row_sum) + consumer * kBlockM;
  }

  // By all threads of the cluster, before anything else: consumers free columns warp by warp.
  __device__ __forceinline__ void init(const DecodeShape& shape) const {
    constexpr int kWarps = kWarpgroupThreads / 32;
    if (threadIdx.x == 0) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) ptx::mbarrier_init(full(stage, i), 1);
#pragma unroll
        for (int c = 0; c < kConsumers; ++c)
          ptx::mbarrier_init(empty(stage, c), kWarps << shape.pair_log2);
      }
      ptx::mbarrier_init(join_ready(), kConsumers * kWarps);
      ptx::mbarrier_init(joined(), kConsumers * kWarps);
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
  }
};

}  // namespace dlattn::sm90_latent
