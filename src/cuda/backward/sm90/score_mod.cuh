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
  float distance;         // of the thread's first query from its first key
  ptx::SmemAddress tile;  // of the consumer, in rows of queries

  // `first_key`, `first_query`: the consumer's, in their sequence.
  __device__ __forceinline__ ScoreModifier(const Problem& problem, const SharedMemory& shared,
                                           int first_key, int first_query, ptx::SmemAddress tile)
      : problem(problem), shared(shared) {
    const ThreadIndex thread;
    const int key = first_key + thread.warp * 16 + thread.lane / 4;
    const int query = first_query + thread.lane % 4 * 2;
    distance = static_cast<float>(shared.work().mask.position(query) - key);
    this->tile = score_row(tile, thread.warp, thread.lane);
  }

  __device__ __forceinline__ void wait_for_tile(unsigned use) const {
    if (problem.score_mod.has_tiles()) shared.score_tiles.wait_full(use);
  }

  // The slope of a head of q; 0 without slopes.
  __device__ __forceinline__ float slope(int batch, int head) const {
    const auto& slopes = problem.score_mod.alibi_slopes;
    if (!slopes.data) return 0.0f;
    return limited_slope(slopes.data[batch * slopes.batch_stride + head * slopes.head_stride]);
  }

  // scores = scores * scale - ALiBi's penalties + the tile, of the consumer's queries from `query`
  // on.
  template <int kScores>
  __device__ __forceinline__ void apply(float (&scores)[kScores], float scale, float slope,
                                        int query) const {
    if (problem.score_mod.alibi_slopes.data) {
      add_alibi(scores, scale, slope, distance + static_cast<float>(query));
      scale = 1.0f;
    }
    if (problem.score_mod.has_tiles())
      add_score_tile<T>(scores, scale, tile + query * kBlockRowBytes);
  }

  // The sum that gradients of scores add to the gradient of the head's slope, but for its sign.
  template <int kScores>
  __device__ __forceinline__ float slope_gradient(const float (&ds)[kScores], int query) const {
    return distance_sum(ds, distance + static_cast<float>(query));
  }

  // With softcap: from tanh of a score's share of the cap to P and to the gradient before softcap,
  // P (dP - delta) (1 - tanh^2), packed. Returns slope_gradient(), if that is wanted. By 16 queries
  // of the tile: modified scores of all of them take too many registers.
  template <int kScores>
  __device__ __forceinline__ float pack_capped(std::uint32_t (&rP)[kScores / 8][4],
                                               std::uint32_t (&rDS)[kScores / 8][4],
                                               const float (&tanhs)[kScores],
                                               const float (&acc_dp)[kScores], float slope,
                                               const RowStatsPair* stats,
                                               const VisibleQueries& visible) const {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kScores / 8; ++c) {
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = tanhs[8 * c + i];
      apply(x, problem.cap, slope, 16 * c);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const RowStatsPair& pair = stats[4 * (2 * c + j)];
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = x[4 * j + i];
          const float difference = dlattn::tile::less_lse(score, pair.lse[i % 2]);
          const float power = ptx::exp2(difference * problem.score_mod.to_log2);
          p[i] = visible.contains(8 * c + 4 * j + i) ? power : 0.0f;
          score = p[i] * (acc_dp[8 * c + 4 * j + i] - pair.delta[i % 2]);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
          rP[c][2 * j + h] = dlattn::tile::pack<T>(p[2 * h], p[2 * h + 1]);
      }
      if (problem.slope_parts) sum += slope_gradient(x, 16 * c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const t = tanhs + 8 * c + 2 * i;
        rDS[c][i] = dlattn::tile::pack<T>(x[2 * i] * fmaf(-t[0], t[0], 1.0f),
                                          x[2 * i + 1] * fmaf(-t[1], t[1], 1.0f));
      }
    }
    return sum;
  }

  // Stores the sum over a warp's keys: a part of the head's (cuda/reduce/partial_sums).
  __device__ __forceinline__ void store_slope_part(float sum, int batch, int head) const {
    sum = dlattn::tile::reduce_sum<32>(sum);
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
