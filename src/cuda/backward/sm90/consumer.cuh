#pragma once

#include "cuda/backward/sm90/dq_part.cuh"
#include "cuda/backward/sm90/products.cuh"
#include "cuda/backward/sm90/score_mod.cuh"
#include "cuda/backward/sm90/scores.cuh"
#include "cuda/backward/sm90/setup.cuh"
#include "cuda/backward/sm90/store.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/reduce_vector.cuh"
#include "cuda/ptx/tma.cuh"

namespace dlattn::backward_sm90 {

// A consumer warpgroup: dK and dV of its 64 keys, and of each step's dQ the part that the block's
// keys give. Scores are transposed, with keys as rows: so P^T and dS^T are, packed, the operands in
// registers of dV += P^T dO and dK += dS^T Q, and dS alone goes through shared memory, for dQ. A
// step ends by starting the scores of the next one, which run while dQ is added.
template <typename T, int kHeadDim, bool kSoftcap, bool kInOrder, bool kScoreMod>
struct Consumer {
  static constexpr int kBlockM = block_m(kHeadDim, kSoftcap);
  static constexpr int kDqNumbers = kBlockM * kHeadDim / (kNumConsumers * kWarpgroupThreads);
  // Whether there may be several passes: not with softcap, as stores_dbias() says.
  static constexpr bool kPasses = kScoreMod && !kSoftcap;
  // Whether dV's product starts before dS is known. It takes registers for P in both forms.
  static constexpr bool kEarlyValues = !kSoftcap && kBlockM <= 64;

  __device__ __forceinline__ Consumer(const Problem& problem,
                                      const Shared<kHeadDim, kSoftcap>& shared, int consumer)
      : problem(problem), shared(shared), work(shared.work()), consumer(consumer) {}

  __device__ __forceinline__ void run() {
    if constexpr (kPasses) {
#pragma unroll 1
      for (pass = 0; pass < problem.passes; ++pass) walk();
    } else {
      walk();
    }
    if (!adds_in_order()) dq_part().wait_until_sent();
  }

 private:
  const Problem& problem;
  const Shared<kHeadDim, kSoftcap>& shared;
  const typename Shared<kHeadDim, kSoftcap>::BlockWork& work;
  const int consumer;
  unsigned use = 0;
  int pass = 0;            // over the batch entries of the block
  float slope_sum = 0.0f;  // of a head's gradients of scores times distances

  float acc_dk[kHeadDim / 2], acc_dv[kHeadDim / 2];
  float acc_s[kBlockM / 2], acc_dp[kBlockM / 2];
  float acc_dq[kDqNumbers];
  std::uint32_t rP[kBlockM / 16][4], rDS[kBlockM / 16][4];

  // Whether blocks add to dQ one after another. Kernels that modify scores are asked.
  __device__ __forceinline__ bool adds_in_order() const {
    return kInOrder || (kScoreMod && problem.tickets);
  }

  // All tiles of queries that see the keys, of all heads of a batch entry.
  __device__ __forceinline__ void walk() {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) acc_dk[i] = acc_dv[i] = 0.0f;
    const int tiles = work.tiles.end - work.tiles.begin;
    if (tiles > 0) {
      ptx::mbarrier_sleep(shared.keys_full, kPasses ? pass % 2 : 0);
      int head = 0, m = work.tiles.begin;  // of the heads of q that share the keys
      start_products();
      start_gradients();
      finish_scores(head, m);
      int left = tiles * problem.heads_per_kv_head;
#pragma unroll 1
      while (--left > 0) {
        const int next = m + 1 < work.tiles.end ? m + 1 : work.tiles.begin;
        step<true>(head, m, next);
        if (next <= m) end_head(head++);
        m = next;
      }
      step<false>(head, m, m);
      end_head(head);
      if constexpr (kPasses) {
        if (ThreadIndex().lane == 0) ptx::mbarrier_arrive(shared.keys_empty);
      }
    }
    store_key_gradients();
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

  __device__ __forceinline__ int head_of_q(int head) const {
    return work.head_kv * problem.heads_per_kv_head + head;
  }
  __device__ __forceinline__ auto score_modifier(int m) const {
    return ScoreModifier<T, Shared<kHeadDim, kSoftcap>>(
        problem, shared, work.n0 + consumer * kWarpgroupRows, m * kBlockM,
        shared.ds(use) + consumer * kBlockM * kBlockRowBytes);
  }

  // After the last tile of a head.
  __device__ __forceinline__ void end_head(int head) {
    if constexpr (kScoreMod) {
      if (!problem.slope_parts) return;
      score_modifier(0).store_slope_part(slope_sum, work.batch + pass, head_of_q(head));
      slope_sum = 0.0f;
    }
  }

  // Probabilities of tile m of a head's queries, of which both products are in flight.
  __device__ __forceinline__ void finish_scores(int head, int m) {
    ptx::wgmma_wait<1>();
    if constexpr (kSoftcap) {
      to_tanh(acc_s, problem.scale_log2);
    } else {
      if constexpr (kScoreMod) {
        const auto modifier = score_modifier(m);
        modifier.wait_for_tile(use);
        modifier.apply(acc_s, problem.scale_log2,
                       modifier.slope(work.batch + pass, head_of_q(head)), 0);
        to_probabilities_by_difference(acc_s, problem.score_mod.to_log2, stats());
      } else {
        to_probabilities(acc_s, problem.scale_log2, stats());
      }
      if (work.is_edge(m)) hide(acc_s, visible_queries_of(m));
      if constexpr (kEarlyValues) tile::wgmma::pack_probabilities<T>(rP, acc_s);
    }
    ptx::wgmma_wait<0>();
  }

  // The rest of the step of tile m of a head's queries, and the probabilities of the next tile.
  template <bool kHasNext>
  __device__ __forceinline__ void step(int head, int m, int next) {
    if constexpr (kEarlyValues) start_key_sums<T, kHeadDim, kBlockM>(acc_dv, rP, shared.dout(use));
    if constexpr (kSoftcap) {
      VisibleQueries visible = {{~0u, ~0u}};
      if (work.is_edge(m)) visible = visible_queries_of(m);
      if constexpr (kScoreMod) {
        const auto modifier = score_modifier(m);
        modifier.wait_for_tile(use);
        slope_sum += modifier.pack_capped(rP, rDS, acc_s, acc_dp,
                                          modifier.slope(work.batch + pass, head_of_q(head)),
                                          stats(), visible);
      } else {
        pack_capped<T>(rP, rDS, acc_s, acc_dp, problem.cap, stats(), visible);
      }
    } else {
      to_score_gradients(acc_dp, acc_s, stats());
      if constexpr (kScoreMod) {
        if (problem.slope_parts) slope_sum += score_modifier(m).slope_gradient(acc_dp, 0);
      }
      if constexpr (!kEarlyValues) tile::wgmma::pack_probabilities<T>(rP, acc_s);
      tile::wgmma::pack_probabilities<T>(rDS, acc_dp);
    }
    if constexpr (!kEarlyValues) start_key_sums<T, kHeadDim, kBlockM>(acc_dv, rP, shared.dout(use));
    start_key_sums<T, kHeadDim, kBlockM>(acc_dk, rDS, shared.q(use));
    const ThreadIndex thread;
    // Two buffers: both consumers have passed the next step's barrier before this one's is written
    // again, and so have finished their products with it.
    store_ds<kBlockM>(rDS, shared.ds(use) + consumer * kBlockM * kBlockRowBytes, thread.warp,
                      thread.lane);
    ptx::fence_proxy_async();
    if constexpr (kScoreMod) {
      if (problem.score_mod.dbias.data) {
        __syncwarp();
        if (thread.lane == 0) shared.score_gradients.end_fill(use);
      }
    }
    if (!adds_in_order()) dq_part().wait_until_sent();
    ptx::barrier_sync(kScoresBarrier, kNumConsumers * kWarpgroupThreads);
    start_dq<T, kHeadDim, kSoftcap>(acc_dq, shared.ds(use), shared.k(), consumer);
    ptx::wgmma_wait<1>();  // dK and dV
    if (thread.lane == 0) shared.queries.release(use);
    ++use;
    if constexpr (kHasNext) start_products();
    ptx::wgmma_wait<kHasNext ? 1 : 0>();
    if constexpr (kScoreMod) {
      if (thread.lane == 0 && problem.score_mod.has_tiles()) shared.score_tiles.release(use - 1);
    }
    if (problem.dq_sum) {
      if (adds_in_order()) {
        shared.may_add.wait_full(use - 1);
        add_dq(head, m);
        shared.end_adding(use - 1);
      } else {
        dq_part().leave(acc_dq);
      }
    }
    if constexpr (kHasNext) start_gradients();
    if (problem.dq_sum && !adds_in_order()) dq_part().send(dq_sum(head, m));
    if constexpr (kHasNext) finish_scores(next <= m ? head + 1 : head, next);
  }

  __device__ __forceinline__ VisibleQueries visible_queries_of(int m) const {
    const ThreadIndex thread;
    const int key = work.n0 + consumer * kWarpgroupRows + thread.warp * 16 + thread.lane / 4;
    return visible_queries<kBlockM>(work.mask, key, m * kBlockM + thread.lane % 4 * 2);
  }

  // The part of the step that is over.
  __device__ __forceinline__ DqPart<kHeadDim, kSoftcap, !kInOrder && !kScoreMod> dq_part() const {
    return {shared, consumer, use - 1};
  }

  // The sum of tile m of a head. Computed anew rather than kept: registers are scarce.
  __device__ __forceinline__ float* dq_sum(int head, int m) const {
    head += pass * problem.heads_per_entry;
    return problem.dq_sum + (work.first_row + head * problem.padded_rows + m * kBlockM) * kHeadDim;
  }

  __device__ __forceinline__ void add_dq(int head, int m) const {
    const int all = static_cast<int>(ptx::reread_thread_index()) - kWarpgroupThreads;
    const int consumer = all / kWarpgroupThreads, thread = all % kWarpgroupThreads;
    float* const to = dq_sum(head, m) + (consumer * kDqNumbers * kWarpgroupThreads + thread * 4);
#pragma unroll
    for (int i = 0; i < kDqNumbers; i += 4)
      ptx::reduce_add_alone(to + i * kWarpgroupThreads,
                            ptx::Float4{acc_dq[i], acc_dq[i + 1], acc_dq[i + 2], acc_dq[i + 3]});
  }

  __device__ __forceinline__ void store_key_gradients() const {
    const tile::SequenceRows rows = {work.start_k, work.rows_k};
    const int entry = problem.cu_seqlens_q ? 0 : work.batch + pass;
    const int first = work.n0 + consumer * kWarpgroupRows;
    store_rows<T, kHeadDim>(problem.dk, entry, work.head_kv, rows, first, problem.head_dim,
                            problem.softmax_scale, acc_dk);
    store_rows<T, kHeadDim>(problem.dv, entry, work.head_kv, rows, first, problem.head_dim_v, 1.0f,
                            acc_dv);
  }
};

}  // namespace dlattn::backward_sm90
