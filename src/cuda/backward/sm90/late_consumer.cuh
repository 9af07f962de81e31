#pragma once

#include "cuda/backward/sm90/dq_part.cuh"
#include "cuda/backward/sm90/products.cuh"
#include "cuda/backward/sm90/scores.cuh"
#include "cuda/backward/sm90/setup.cuh"
#include "cuda/backward/sm90/store.cuh"
#include "cuda/ptx/barrier.cuh"

namespace dlattn::backward_sm90 {

// A consumer warpgroup of long walks without softcap, modified scores and a fixed order of sums,
// with up to 128 columns. It computes what Consumer does, but the dQ of a tile of queries a step
// later. So the other consumer's half of dS has a step's time to come, nobody waits for it, and the
// two need not be at the same place: the second one starts when the first has its first dS. From
// then on one's exponentials and gradients of scores run beside the other's products. A block loses
// some two steps' time at its ends.
template <typename T, int kHeadDim>
struct LateConsumer {
  using Memory = Shared<kHeadDim, false>;
  static constexpr int kBlockM = Memory::kBlockM;
  static constexpr int kDqNumbers = kBlockM * kHeadDim / (kNumConsumers * kWarpgroupThreads);
  // Whether dV's product starts before dS is known. It takes registers for P in both forms.
  static constexpr bool kEarlyValues = kBlockM <= 64;

  __device__ __forceinline__ LateConsumer(const Problem& problem, const Memory& shared,
                                          int consumer)
      : problem(problem), shared(shared), work(shared.work()), consumer(consumer) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) acc_dk[i] = acc_dv[i] = 0.0f;
    const int tiles = work.tiles.end - work.tiles.begin;
    if (tiles > 0) walk(tiles * problem.heads_per_kv_head);
    store_key_gradients();
    dq_part().wait_until_sent();
  }

 private:
  const Problem& problem;
  const Memory& shared;
  const typename Memory::BlockWork& work;
  const int consumer;
  unsigned use = 0;

  float acc_dk[kHeadDim / 2], acc_dv[kHeadDim / 2];
  float acc_s[kBlockM / 2], acc_dp[kBlockM / 2];
  float acc_dq[kDqNumbers];
  std::uint32_t rP[kBlockM / 16][4], rDS[kBlockM / 16][4];

  // All tiles of queries that see the keys, of all heads that share them.
  __device__ __forceinline__ void walk(int left) {
    ptx::mbarrier_sleep(shared.keys_full, 0);
    int head = 0, m = work.tiles.begin, last_head = 0, last_m = 0;
    bool has_last = false;
    if (consumer == 1) ptx::barrier_sync(kStartBarrier, kNumConsumers * kWarpgroupThreads);
    start_products();
    start_gradients();
    finish_scores(m);
#pragma unroll 1
    while (--left > 0) {
      const int next = m + 1 < work.tiles.end ? m + 1 : work.tiles.begin;
      step<true>(next, last_head, last_m, has_last);
      has_last = true;
      last_head = head;
      last_m = m;
      if (next <= m) ++head;
      m = next;
    }
    step<false>(m, last_head, last_m, has_last);
    shared.score_gradients.wait_full(use - 1);
    meet();
    start_dq<T, kHeadDim, false>(acc_dq, shared.ds(use - 1), shared.k(), consumer);
    ptx::wgmma_wait<0>();
    if (problem.dq_sum) {
      dq_part().leave(acc_dq);
      dq_part().send(dq_sum(head, m));
    }
  }

  __device__ __forceinline__ ptx::SmemAddress own_rows(ptx::SmemAddress keys) const {
    // Read anew, so that descriptors are not kept in registers from step to step.
    return ptx::reread(keys) + consumer * kWarpgroupRows * kBlockRowBytes;
  }
  __device__ __forceinline__ const RowStatsPair* stats() const {
    return shared.row_stats(use) + ThreadIndex().lane % 4;
  }

  // Start the products of the next tile of queries.
  __device__ __forceinline__ void start_products() {
    shared.queries.wait_full(use);
    start_scores<T, kHeadDim, kBlockM>(acc_s, own_rows(shared.k()), shared.q(use));
  }
  __device__ __forceinline__ void start_gradients() {
    start_scores<T, kHeadDim, kBlockM>(acc_dp, own_rows(shared.v()), shared.dout(use));
  }

  // Probabilities of tile m, of which both products are in flight.
  __device__ __forceinline__ void finish_scores(int m) {
    ptx::wgmma_wait<1>();
    to_probabilities(acc_s, problem.scale_log2, stats());
    if (work.is_edge(m)) hide(acc_s, visible_queries_of(m));
    if constexpr (kEarlyValues) tile::wgmma::pack_probabilities<T>(rP, acc_s);
    ptx::wgmma_wait<0>();
  }

  // The rest of a tile's step, dQ of the last one, if there is one, and the next probabilities.
  template <bool kHasNext>
  __device__ __forceinline__ void step(int next, int last_head, int last_m, bool has_last) {
    const ThreadIndex thread;
    if constexpr (kEarlyValues) start_key_sums<T, kHeadDim, kBlockM>(acc_dv, rP, shared.dout(use));
    to_score_gradients(acc_dp, acc_s, stats());
    if constexpr (!kEarlyValues) tile::wgmma::pack_probabilities<T>(rP, acc_s);
    tile::wgmma::pack_probabilities<T>(rDS, acc_dp);
    if constexpr (!kEarlyValues) start_key_sums<T, kHeadDim, kBlockM>(acc_dv, rP, shared.dout(use));
    start_key_sums<T, kHeadDim, kBlockM>(acc_dk, rDS, shared.q(use));
    shared.score_gradients.wait_empty(use);
    store_ds<kBlockM>(rDS, shared.ds(use) + consumer * kBlockM * kBlockRowBytes, thread.warp,
                      thread.lane);
    ptx::fence_proxy_async();
    __syncwarp();
    if (thread.lane == 0) shared.score_gradients.end_fill(use);
    if (!has_last && consumer == 0)
      ptx::barrier_arrive(kStartBarrier, kNumConsumers * kWarpgroupThreads);
    if (has_last) shared.score_gradients.wait_full(use - 1);
    meet();
    // Nobody takes the first step's, which is of what does not change. A branch around the product
    // made the compiler wait for each.
    start_dq<T, kHeadDim, false>(acc_dq, has_last ? shared.ds(use - 1) : shared.k(), shared.k(),
                                 consumer);
    ptx::wgmma_wait<1>();  // dK and dV
    if (thread.lane == 0) shared.queries.release(use);
    ++use;
    if constexpr (kHasNext) start_products();
    ptx::wgmma_wait<kHasNext ? 1 : 0>();
    if (has_last) {
      if (thread.lane == 0) shared.score_gradients.release(use - 2);
      if (problem.dq_sum) dq_part().leave(acc_dq);
    }
    if constexpr (kHasNext) start_gradients();
    if (problem.dq_sum && has_last) dq_part().send(dq_sum(last_head, last_m));
    if constexpr (kHasNext) finish_scores(next);
  }

  // Behind it the consumer's threads may write the next part of dQ.
  __device__ __forceinline__ void meet() const {
    dq_part().wait_until_sent();
    ptx::barrier_sync(kDqBarrier + consumer, kWarpgroupThreads);
  }

  __device__ __forceinline__ VisibleQueries visible_queries_of(int m) const {
    const ThreadIndex thread;
    const int key = work.n0 + consumer * kWarpgroupRows + thread.warp * 16 + thread.lane / 4;
    return visible_queries<kBlockM>(work.mask, key, m * kBlockM + thread.lane % 4 * 2);
  }

  __device__ __forceinline__ DqPart<kHeadDim, false> dq_part() const { return {shared, consumer}; }

  // The sum of tile m of a head. Computed anew rather than kept: registers are scarce.
  __device__ __forceinline__ float* dq_sum(int head, int m) const {
    return problem.dq_sum + (work.first_row + head * problem.padded_rows + m * kBlockM) * kHeadDim;
  }

  __device__ __forceinline__ void store_key_gradients() const {
    const tile::SequenceRows rows = {work.start_k, work.rows_k};
    const int entry = problem.cu_seqlens_q ? 0 : work.batch;
    const int first = work.n0 + consumer * kWarpgroupRows;
    store_rows<T, kHeadDim>(problem.dk, entry, work.head_kv, rows, first, problem.head_dim,
                            problem.softmax_scale, acc_dk);
    store_rows<T, kHeadDim>(problem.dv, entry, work.head_kv, rows, first, problem.head_dim_v, 1.0f,
                            acc_dv);
  }
};

}  // namespace dlattn::backward_sm90
