#pragma once

#include "cuda/backward/sm90/scores.cuh"
#include "cuda/backward/sm90/setup.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::backward_sm90 {

// ALiBi, and the tiles of bias and mask (score_tiles.cuh), for the scores that a consumer's thread
// has of a tile of queries. Made anew for each use: registers are scarce.
template <typename T, typename SharedMemory>
struct ScoreModifier {
  const Problem& problem;
  const SharedMemory& shared;
  unsigned use;
  int batch, head;        // of q
  int first_key;          // the consumer's, in its sequence
  int first_query;        // its queries' first one, in its sequence
  ptx::SmemAddress tile;  // the consumer's part of the tile, in rows of queries

  __device__ __forceinline__ void wait_for_tile() const {
    if (problem.score_mod.has_tiles()) shared.score_tiles.wait_full(use);
  }

  // Of the thread's first query from its first key.
  __device__ __forceinline__ float distance() const {
    const ThreadIndex thread;
    const int key = first_key + thread.warp * 16 + thread.lane / 4;
    const int query = first_query + thread.lane % 4 * 2;
    return static_cast<float>(shared.work().mask.position(query) - key);
  }
  __device__ __forceinline__ float slope() const {
    const auto& slopes = problem.score_mod.alibi_slopes;
    return limited_slope(slopes.data[batch * slopes.batch_stride + head * slopes.head_stride]);
  }

  // scores = scores * scale - ALiBi's penalties + the tile.
  template <int kScores>
  __device__ __forceinline__ void apply(float (&scores)[kScores], float scale) const {
    if (problem.score_mod.alibi_slopes.data) {
      add_alibi(scores, scale, slope(), distance());
      scale = 1.0f;
    }
    if (!problem.score_mod.has_tiles()) return;
    const ThreadIndex thread;
    add_score_tile<T>(scores, scale, tile, thread.warp, thread.lane);
  }

  // What gradients of scores add to the gradient of the head's slope, but for its sign.
  template <int kScores>
  __device__ __forceinline__ float slope_gradient(const float (&ds)[kScores]) const {
    return distance_sum(ds, distance());
  }

  // Stores the sum over a warp's keys: a part of the head's (cuda/reduce/partial_sums).
  __device__ __forceinline__ void store_slope_part(float sum) const {
    sum = tile::reduce_sum<32>(sum);
    const ThreadIndex thread;
    if (thread.lane != 0) return;
    const std::int64_t head_index = std::int64_t{batch} * problem.heads_per_entry + head;
    const int blocks = static_cast<int>(problem.num_m_blocks.divisor());
    const int warp = static_cast<int>(ptx::reread_thread_index()) / 32 - kWarpgroupThreads / 32;
    const std::int64_t block = head_index * blocks + shared.work().n0 / SharedMemory::kBlockN;
    problem.slope_parts[block * kConsumerWarps + warp] = -sum;
  }
};

}  // namespace dlattn::backward_sm90
