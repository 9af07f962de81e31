#pragma once

#include "cuda/backward/sm90/setup.cuh"
#include "cuda/ptx/cluster.cuh"

namespace dlattn::backward_sm90 {

using PairWork = Work<kPairQueries, kPairKeys>;

// Shared memory and barriers of a pair's first or second block (kRank).
template <int kHeadDim, int kRank>
struct PairShared {
  static constexpr PairSmemMap kMap = pair_smem_map(kHeadDim);
  static constexpr int kQueryBytes = tile_bytes(kPairQueries, kHeadDim);
  static constexpr int kKeyBytes = tile_bytes(kPairKeys, kHeadDim);
  static constexpr int kScoreBytes = tile_bytes(kPairQueries, kPairKeys);
  static constexpr int kOwnScoreBytes = kScoreBytes / kNumConsumers;  // of a consumer's keys
  static constexpr int kQueryStages = kRank == 0 ? kNumStages : 1;
  static constexpr int kWarps = kConsumerWarps;

  ptx::SmemAddress base;
  ptx::SmemAddress keys_full;
  tile::Ring<kQueryStages> q;
  tile::Ring<kNumStages> dout;  // the pair's
  // Tiles of scores: full in the second block, where dS is complete; empty in the first one, which
  // may send P.
  tile::Ring<kNumStages> scores;
  ptx::SmemAddress probabilities;  // [kNumConsumers][kNumStages]: P of a consumer's keys has come
  ptx::SmemAddress copies;         // [kNumStages]: dS has come to the first block

  __device__ __forceinline__ explicit PairShared(ptx::SmemAddress base)
      : base(base),
        keys_full(base + kMap.mbarriers),
        q(keys_full + 8),
        dout(keys_full + 8 + 4 * 8),
        scores(keys_full + 8 + 8 * 8),
        probabilities(keys_full + 8 + 12 * 8),
        copies(keys_full + 8 + 16 * 8) {
    static_assert(kNumStages == 2 && kNumConsumers == 2 && kPairMbarriers == 19, "");
  }

  __device__ __forceinline__ ptx::SmemAddress keys() const { return base + kMap.keys; }
  // 64 columns of K, of which each block of the pair has two such parts for dQ.
  __device__ __forceinline__ ptx::SmemAddress dq_keys(int consumer) const {
    return base + (kRank == 0 ? kMap.keys : kMap.half_keys) +
           tile_bytes(kPairKeys, consumer * kBlockColumns);
  }
  __device__ __forceinline__ ptx::SmemAddress q_tile(unsigned use) const {
    return base + (kRank == 0 ? kMap.q : kMap.second_q) + q.stage(use) * kQueryBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress dout_tile(unsigned use) const {
    return base + kMap.dout + dout.stage(use) * kQueryBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress score_tile(unsigned use) const {
    return base + kMap.scores + scores.stage(use) * kScoreBytes;
  }
  __device__ __forceinline__ RowStatsPair* row_stats(unsigned use) const {
    return reinterpret_cast<RowStatsPair*>(ptx::dynamic_smem() + kMap.row_stats) +
           use % kNumStages * (kPairQueries / 2);
  }
  __device__ __forceinline__ ptx::SmemAddress probabilities_full(int consumer, unsigned use) const {
    return probabilities + (consumer * kNumStages + scores.stage(use)) * ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress copy_full(unsigned use) const {
    return copies + scores.stage(use) * ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ PairWork& work() const {
    static_assert(sizeof(PairWork) <= kWorkBytes, "");
    return *reinterpret_cast<PairWork*>(ptx::dynamic_smem() + kMap.work);
  }

  // By one thread; then a barrier of the cluster. The row's numbers come with Q in the first block,
  // with dO in the second one.
  __device__ __forceinline__ void init() const {
    ptx::mbarrier_init(keys_full, 1);
    q.init(kWarps, kRank == 0 ? 1 + 32 : 1);
    dout.init(kPairBlocks * kWarps, kRank == 0 ? 1 : 1 + 32);
    scores.init(kWarps, kWarps);
#pragma unroll
    for (int i = 0; i < (kNumConsumers + 1) * kNumStages; ++i)
      ptx::mbarrier_init(probabilities + i * ptx::kMbarrierBytes, 1);
    ptx::fence_mbarrier_init();
  }

  // By a warp, when it has read a tile of dO: to the producers of both blocks.
  __device__ __forceinline__ void release_dout(unsigned use) const {
    const auto lane = static_cast<unsigned>(ThreadIndex().lane);
    if (lane < kPairBlocks) ptx::mbarrier_arrive_at_block(dout.empty_barrier(use), lane);
  }
};

}  // namespace dlattn::backward_sm90
