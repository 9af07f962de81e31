#pragma once

#include <cstring>
#include <type_traits>

#include "cuda/backward/sm90/pair_setup.cuh"
#include "cuda/backward/sm90/products.cuh"
#include "cuda/backward/sm90/scores.cuh"
#include "cuda/backward/sm90/store.cuh"
#include "cuda/ptx/permute.cuh"
#include "cuda/ptx/reduce_vector.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/wgmma/accumulators.cuh"

namespace dlattn::backward_sm90 {

// P on its way to the second block: two numbers from 0 to below 32, each in 16 bits, 5 of exponent
// and 11 of fraction, as they lie in a float of 2^-100 of the number. float16 has a bit less for
// the sign; with it, rounded like dS, dq and dk would be off by 1.4 times as much. A P that is NaN
// has a delta that is, too.
__device__ __forceinline__ std::uint32_t to_sent(float low, float high) {
  std::uint32_t bits[2];
  const float scaled[2] = {low * 0x1p-100f, high * 0x1p-100f};
  memcpy(bits, scaled, sizeof bits);
  return ptx::permute_bytes<0x7632>((bits[0] << 4) + 0x8000u, (bits[1] << 4) + 0x8000u);
}
__device__ __forceinline__ void from_sent(float (&p)[2], std::uint32_t sent) {
  const std::uint32_t bits[2] = {sent << 16 >> 4, (sent & 0xffff0000u) >> 4};
  memcpy(p, bits, sizeof bits);
  p[0] *= 0x1p100f;
  p[1] *= 0x1p100f;
}

// Common to the consumers of both blocks of a pair. Each has 64 of the pair's keys, of which it
// sums up dV or dK, and computes 64 columns of each step's dQ, of all of the pair's keys.
template <typename T, int kHeadDim, int kRank>
struct PairConsumer {
  static constexpr int kBlockM = kPairQueries;

  const Problem& problem;
  const PairShared<kHeadDim, kRank>& shared;
  const PairWork& work;
  const int consumer;

  // Calls start(m) for the first tile of queries that sees one of the keys, and
  // step(has_next, head, m, next) for all of them; `next`: the tile of the next step.
  template <typename Start, typename Step>
  __device__ __forceinline__ void walk(Start start, Step step) const {
    const int tiles = work.tiles.end - work.tiles.begin;
    if (tiles <= 0) return;
    ptx::mbarrier_sleep(shared.keys_full, 0);
    int head = 0, m = work.tiles.begin;  // of the heads of q that share the keys
    start(m);
    int left = tiles * problem.heads_per_kv_head;
#pragma unroll 1
    while (--left > 0) {
      const int next = m + 1 < work.tiles.end ? m + 1 : work.tiles.begin;
      step(std::true_type(), head, m, next);
      if (next <= m) ++head;
      m = next;
    }
    step(std::false_type(), head, m, m);
  }

  __device__ __forceinline__ ptx::SmemAddress own_keys() const {
    // Read anew, so that descriptors are not kept in registers from step to step.
    return ptx::reread(shared.keys()) + consumer * kWarpgroupRows * kBlockRowBytes;
  }
  // Where scores of the consumer's keys lie.
  __device__ __forceinline__ ptx::SmemAddress own_scores(unsigned use) const {
    return shared.score_tile(use) + consumer * shared.kOwnScoreBytes;
  }
  __device__ __forceinline__ const RowStatsPair* stats(unsigned use) const {
    return shared.row_stats(use) + ThreadIndex().lane % 4;
  }

  __device__ __forceinline__ void start_dq(float (&acc)[kBlockColumns / 2], unsigned use) const {
    start_wide_dq<T, kPairKeys>(acc, shared.score_tile(use), ptx::reread(shared.dq_keys(consumer)));
  }
  // The thread's first numbers in the sum of tile m of a head; null: dq is not wanted.
  __device__ __forceinline__ float* dq_sum(int head, int m) const {
    if (!problem.dq_sum) return nullptr;
    // Computed anew rather than kept: registers are scarce.
    const int all = static_cast<int>(ptx::reread_thread_index()) - kWarpgroupThreads;
    const int block = kRank * kNumConsumers + all / kWarpgroupThreads;
    return problem.dq_sum + (work.first_row + head * problem.padded_rows + m * kBlockM) * kHeadDim +
           block * (kBlockColumns / 2) * kWarpgroupThreads + all % kWarpgroupThreads * 4;
  }
  __device__ __forceinline__ static void add_dq(float* to, const float (&acc)[kBlockColumns / 2]) {
    if (!to) return;
#pragma unroll
    for (int i = 0; i < kBlockColumns / 2; i += 4)
      ptx::reduce_add(to + i * kWarpgroupThreads,
                      ptx::Float4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]});
  }

  __device__ __forceinline__ void store(const MutableTensorView& to, int columns, float scale,
                                        const float (&acc)[kHeadDim / 2]) const {
    store_rows<T, kHeadDim>(to, problem.cu_seqlens_q ? 0 : work.batch, work.head_kv,
                            {work.start_k, work.rows_k}, work.n0 + consumer * kWarpgroupRows,
                            columns, scale, acc);
  }
};

// A consumer of the first block: P and dV.
template <typename T, int kHeadDim>
struct ValueConsumer : PairConsumer<T, kHeadDim, 0> {
  using Base = PairConsumer<T, kHeadDim, 0>;
  using Base::kBlockM, Base::problem, Base::shared, Base::work, Base::consumer;

  unsigned use = 0;
  float acc_dv[kHeadDim / 2], acc_s[kBlockM / 2], acc_dq[kBlockColumns / 2];
  std::uint32_t rP[kBlockM / 16][4];
  float* to_add = nullptr;  // where acc_dq belongs: it is added under the next step's products

  __device__ __forceinline__ ValueConsumer(const Problem& problem,
                                           const PairShared<kHeadDim, 0>& shared, int consumer)
      : Base{problem, shared, shared.work(), consumer} {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) acc_dv[i] = 0.0f;
    this->walk(
        [&](int m) {
          start_products();
          ptx::wgmma_wait<0>();
          finish_scores(m);
        },
        [&](auto has_next, int head, int m, int next) {
          step<decltype(has_next)::value>(head, m, next);
        });
    this->add_dq(to_add, acc_dq);
    this->store(problem.dv, problem.head_dim_v, 1.0f, acc_dv);
  }

 private:
  __device__ __forceinline__ void start_products() {
    shared.q.wait_full(use);
    start_scores<T, kHeadDim, kBlockM, kBlockM, kPairKeys>(acc_s, this->own_keys(),
                                                           shared.q_tile(use));
  }

  // Probabilities of tile m, to registers and to the second block.
  __device__ __forceinline__ void finish_scores(int m) {
    to_probabilities(acc_s, problem.scale_log2, this->stats(use));
    __syncwarp();
    const ThreadIndex thread;
    if (thread.lane == 0) shared.q.release(use);
    if (work.is_edge(m)) hide(acc_s, visible_queries_of(m));
    tile::wgmma::pack_probabilities<T>(rP, acc_s);
    if (consumer == 0 && thread.index == 0)
      ptx::mbarrier_arrive_expect_tx(shared.copy_full(use), shared.kScoreBytes);
    // The second block has read what lay there, and sent it here: see step().
    shared.scores.wait_empty(use);
    const ptx::SmemAddress row = score_row(this->own_scores(use), thread.warp, thread.lane);
    const ptx::SmemAddress full = shared.probabilities_full(consumer, use);
#pragma unroll
    for (int m16 = 0; m16 < kBlockM / 16; ++m16) {
      std::uint32_t sent[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sent[e] = to_sent(acc_s[8 * m16 + 2 * e], acc_s[8 * m16 + 2 * e + 1]);
      ptx::store_at_block(row + m16 * 16 * kBlockRowBytes, sent, full, 1);
    }
  }

  // The rest of the step of tile m of a head's queries, and the probabilities of the next tile.
  template <bool kHasNext>
  __device__ __forceinline__ void step(int head, int m, int next) {
    const unsigned own = use++;
    shared.dout.wait_full(own);
    start_key_sums<T, kHeadDim, kBlockM>(acc_dv, rP, shared.dout_tile(own));
    if constexpr (kHasNext) start_products();
    this->add_dq(to_add, acc_dq);
    ptx::wgmma_wait<kHasNext ? 1 : 0>();
    shared.release_dout(own);
    if constexpr (kHasNext) {
      ptx::wgmma_wait<0>();
      finish_scores(next);
    }
    ptx::mbarrier_sleep(shared.copy_full(own), static_cast<int>(own / kNumStages % 2));
    this->start_dq(acc_dq, own);
    ptx::wgmma_wait<0>();
    to_add = this->dq_sum(head, m);
  }

  __device__ __forceinline__ VisibleQueries visible_queries_of(int m) const {
    const ThreadIndex thread;
    const int key = work.n0 + consumer * kWarpgroupRows + thread.warp * 16 + thread.lane / 4;
    return visible_queries<kBlockM>(work.mask, key, m * kBlockM + thread.lane % 4 * 2);
  }
};

// A consumer of the second block: dS and dK.
template <typename T, int kHeadDim>
struct KeyConsumer : PairConsumer<T, kHeadDim, 1> {
  using Base = PairConsumer<T, kHeadDim, 1>;
  using Base::kBlockM, Base::problem, Base::shared, Base::work, Base::consumer;

  unsigned use = 0;
  float acc_dk[kHeadDim / 2], acc_dp[kBlockM / 2], acc_dq[kBlockColumns / 2];
  std::uint32_t rDS[kBlockM / 16][4];
  float* to_add = nullptr;  // as ValueConsumer's

  __device__ __forceinline__ KeyConsumer(const Problem& problem,
                                         const PairShared<kHeadDim, 1>& shared, int consumer)
      : Base{problem, shared, shared.work(), consumer} {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) acc_dk[i] = 0.0f;
    this->walk(
        [&](int) {
          start_products();
          ptx::wgmma_wait<0>();
          finish_gradients();
        },
        [&](auto has_next, int head, int m, int) { step<decltype(has_next)::value>(head, m); });
    this->add_dq(to_add, acc_dq);
    this->store(problem.dk, problem.head_dim, problem.softmax_scale, acc_dk);
  }

 private:
  __device__ __forceinline__ void start_products() {
    shared.dout.wait_full(use);
    start_scores<T, kHeadDim, kBlockM, kBlockM, kPairKeys>(acc_dp, this->own_keys(),
                                                           shared.dout_tile(use));
  }

  // dS of a tile, to registers and to shared memory. It takes the place of P, which the first block
  // sends: each lane's rows are those of its warp's part of the tile.
  __device__ __forceinline__ void finish_gradients() {
    const ThreadIndex thread;
    const ptx::SmemAddress full = shared.probabilities_full(consumer, use);
    if (thread.index == 0) ptx::mbarrier_arrive_expect_tx(full, shared.kOwnScoreBytes);
    ptx::mbarrier_sleep(full, static_cast<int>(use / kNumStages % 2));
    const ptx::SmemAddress row = score_row(this->own_scores(use), thread.warp, thread.lane);
    const RowStatsPair* const row_stats = this->stats(use);
#pragma unroll
    for (int m16 = 0; m16 < kBlockM / 16; ++m16) {
      const auto* const at = reinterpret_cast<const uint4*>(
          ptx::dynamic_smem() + (row + m16 * 16 * kBlockRowBytes - shared.base));
      const uint4 loaded = *at;
      const std::uint32_t sent[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const RowStatsPair& pair = row_stats[4 * (2 * m16 + e / 2)];
        float p[2];
        from_sent(p, sent[e]);
        float* const dp = acc_dp + 8 * m16 + 2 * e;
        dp[0] = p[0] * (dp[0] - pair.delta[0]);
        dp[1] = p[1] * (dp[1] - pair.delta[1]);
      }
    }
    tile::wgmma::pack_probabilities<T>(rDS, acc_dp);
    __syncwarp();
    shared.release_dout(use);
    store_ds<kBlockM>(rDS, this->own_scores(use), thread.warp, thread.lane);
    ptx::fence_proxy_async();
    __syncwarp();
    if (thread.lane == 0) shared.scores.end_fill(use);
  }

  template <bool kHasNext>
  __device__ __forceinline__ void step(int head, int m) {
    const unsigned own = use++;
    shared.q.wait_full(own);
    start_key_sums<T, kHeadDim, kBlockM>(acc_dk, rDS, shared.q_tile(own));
    if constexpr (kHasNext) start_products();
    this->add_dq(to_add, acc_dq);
    shared.scores.wait_full(own);
    this->start_dq(acc_dq, own);
    ptx::wgmma_wait<kHasNext ? 2 : 1>();
    if (ThreadIndex().lane == 0) shared.q.release(own);
    if constexpr (kHasNext) {
      ptx::wgmma_wait<1>();
      finish_gradients();
    }
    ptx::wgmma_wait<0>();
    if (ThreadIndex().lane == 0) ptx::mbarrier_arrive_at_block(shared.scores.empty_barrier(own), 0);
    to_add = this->dq_sum(head, m);
  }
};

}  // namespace dlattn::backward_sm90
