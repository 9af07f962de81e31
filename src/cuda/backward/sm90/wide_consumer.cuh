#pragma once

#include "cuda/backward/sm90/products.cuh"
#include "cuda/backward/sm90/score_mod.cuh"
#include "cuda/backward/sm90/scores.cuh"
#include "cuda/backward/sm90/setup.cuh"
#include "cuda/backward/sm90/store.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/reduce_vector.cuh"
#include "cuda/ptx/tma.cuh"

namespace dlattn::backward_sm90 {

// A consumer warpgroup where head_dim is so wide that it has half of the columns of dK, dV and dQ.
// It computes the scores of all 64 keys with half of a step's queries; P and dS go through shared
// memory, for both. dQ's columns are added in two parts, for registers.
template <typename T, int kHeadDim, bool kSoftcap, bool kInOrder, bool kScoreMod>
struct WideConsumer {
  static constexpr int kBlockM = block_m(kHeadDim, kSoftcap), kBlockN = block_n(kHeadDim);
  static constexpr int kQueries = kBlockM / kNumConsumers;
  static constexpr int kColumns = kHeadDim / kNumConsumers;
  // Whether there may be several passes: not with softcap, as stores_dbias() says.
  static constexpr bool kPasses = kScoreMod && !kSoftcap;
  static_assert(kBlockM == 64 && kBlockN == 64 && kColumns == 2 * kBlockColumns, "");

  __device__ __forceinline__ WideConsumer(const Problem& problem,
                                          const Shared<kHeadDim, kSoftcap>& shared, int consumer)
      : problem(problem), shared(shared), work(shared.work()), consumer(consumer) {}

  __device__ __forceinline__ void run() {
    if constexpr (kPasses) {
#pragma unroll 1
      for (pass = 0; pass < problem.passes; ++pass) walk();
    } else {
      walk();
    }
  }

 private:
  const Problem& problem;
  const Shared<kHeadDim, kSoftcap>& shared;
  const typename Shared<kHeadDim, kSoftcap>::BlockWork& work;
  const int consumer;
  unsigned use = 0;
  int pass = 0;            // over the batch entries of the block
  float slope_sum = 0.0f;  // of a head's gradients of scores times distances

  float acc_dk[kColumns / 2], acc_dv[kColumns / 2];
  float acc_s[kQueries / 2], acc_dp[kQueries / 2];
  float acc_dq[kBlockColumns / 2];
  std::uint32_t rP[kQueries / 16][4], rDS[kQueries / 16][4];

  // Whether blocks add to dQ one after another. Kernels that modify scores are asked.
  __device__ __forceinline__ bool adds_in_order() const {
    return kInOrder || (kScoreMod && problem.tickets);
  }

  // All tiles of queries that see the keys, of all heads of a batch entry.
  __device__ __forceinline__ void walk() {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc_dk[i] = acc_dv[i] = 0.0f;
    const int tiles = work.tiles.end - work.tiles.begin;
    if (tiles > 0) {
      ptx::mbarrier_sleep(shared.keys_full, kPasses ? pass % 2 : 0);
      int head = 0, m = work.tiles.begin;  // of the heads of q that share the keys
      start_products();
      ptx::wgmma_wait<0>();
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

  __device__ __forceinline__ const RowStatsPair* stats() const {
    return shared.row_stats(use) + consumer * (kQueries / 2) + ThreadIndex().lane % 4;
  }
  // The consumer's columns, from block `block` of them on, of a tile of 64 rows.
  __device__ __forceinline__ ptx::SmemAddress columns(ptx::SmemAddress tile, int block = 0) const {
    // Read anew, so that descriptors are not kept in registers from step to step.
    return ptx::reread(tile) +
           (consumer * (kColumns / kBlockColumns) + block) * kBlockM * kBlockRowBytes;
  }
  // Where the consumer's queries begin in a tile of rows of queries.
  static constexpr int kRowBytes = kQueries * kBlockRowBytes;

  // Starts the scores of the next tile of queries and their gradients' product.
  __device__ __forceinline__ void start_products() {
    const int rows = consumer * kRowBytes;
    shared.queries.wait_full(use);
    start_scores<T, kHeadDim, kBlockM, kQueries>(acc_s, ptx::reread(shared.k()),
                                                 shared.q(use) + rows);
    start_scores<T, kHeadDim, kBlockM, kQueries>(acc_dp, ptx::reread(shared.v()),
                                                 shared.dout(use) + rows);
  }

  __device__ __forceinline__ int head_of_q(int head) const {
    return work.head_kv * problem.heads_per_kv_head + head;
  }
  __device__ __forceinline__ auto score_modifier(int m) const {
    return ScoreModifier<T, Shared<kHeadDim, kSoftcap>>(problem, shared, work.n0,
                                                        m * kBlockM + consumer * kQueries,
                                                        shared.ds(use) + consumer * kRowBytes);
  }

  // After the last tile of a head.
  __device__ __forceinline__ void end_head(int head) {
    if constexpr (kScoreMod) {
      if (!problem.slope_parts) return;
      score_modifier(0).store_slope_part(slope_sum, work.batch + pass, head_of_q(head));
      slope_sum = 0.0f;
    }
  }

  // Probabilities of tile m of a head's queries, of which both products are known.
  __device__ __forceinline__ void finish_scores(int head, int m) {
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
    }
  }

  // The rest of the step of tile m of a head's queries, and the probabilities of the next tile.
  template <bool kHasNext>
  __device__ __forceinline__ void step(int head, int m, int next) {
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
      tile::wgmma::pack_probabilities<T>(rP, acc_s);
      tile::wgmma::pack_probabilities<T>(rDS, acc_dp);
    }
    {
      const ThreadIndex thread;
      const int rows = consumer * kRowBytes;
      store_ds<kQueries>(rP, shared.p(use) + rows, thread.warp, thread.lane);
      store_ds<kQueries>(rDS, shared.ds(use) + rows, thread.warp, thread.lane);
    }
    // Two buffers: both consumers have passed the next step's barrier before these are written
    // again, and so have finished their products with them.
    ptx::fence_proxy_async();
    if constexpr (kScoreMod) {
      if (problem.score_mod.dbias.data) {
        __syncwarp();
        if (ThreadIndex().lane == 0) shared.score_gradients.end_fill(use);
      }
    }
    ptx::barrier_sync(kScoresBarrier, kNumConsumers * kWarpgroupThreads);
    start_wide_key_sums<T, kColumns, kBlockM>(acc_dv, shared.p(use), columns(shared.dout(use)));
    start_wide_key_sums<T, kColumns, kBlockM>(acc_dk, shared.ds(use), columns(shared.q(use)));
    const ptx::SmemAddress own_ds = shared.ds(use);
    start_wide_dq<T, kBlockN>(acc_dq, own_ds, columns(shared.k()));
    const unsigned done = use++;
    if constexpr (kHasNext) start_products();
    ptx::wgmma_wait<kHasNext ? 2 : 0>();  // dV, dK and the first part of dQ
    if (ThreadIndex().lane == 0) shared.queries.release(done);
    if (problem.dq_sum) {
      if (adds_in_order()) shared.may_add.wait_full(done);
      add_dq(head, m, 0);
    }
    start_wide_dq<T, kBlockN>(acc_dq, own_ds, columns(shared.k(), 1));
    if constexpr (kHasNext) {
      ptx::wgmma_wait<1>();
      finish_scores(next <= m ? head + 1 : head, next);
    }
    ptx::wgmma_wait<0>();
    if constexpr (kScoreMod) {
      if (ThreadIndex().lane == 0 && problem.score_mod.has_tiles())
        shared.score_tiles.release(done);
    }
    if (problem.dq_sum) {
      add_dq(head, m, 1);
      if (adds_in_order()) shared.end_adding(done);
    }
  }

  __device__ __forceinline__ VisibleQueries visible_queries_of(int m) const {
    const ThreadIndex thread;
    const int key = work.n0 + thread.warp * 16 + thread.lane / 4;
    return visible_queries<kQueries>(work.mask, key,
                                     m * kBlockM + consumer * kQueries + thread.lane % 4 * 2);
  }

  // Adds block `block` of the consumer's columns.
  __device__ __forceinline__ void add_dq(int head, int m, int block) const {
    // Computed anew rather than kept: registers are scarce.
    const int all = static_cast<int>(ptx::reread_thread_index()) - kWarpgroupThreads;
    const int consumer = all / kWarpgroupThreads, thread = all % kWarpgroupThreads;
    constexpr int kNumbers = kBlockColumns / 2;
    head += pass * problem.heads_per_entry;
    float* const to =
        problem.dq_sum + (work.first_row + head * problem.padded_rows + m * kBlockM) * kHeadDim +
        (consumer * (kColumns / 2) + block * kNumbers) * kWarpgroupThreads + thread * 4;
#pragma unroll
    for (int i = 0; i < kNumbers; i += 4) {
      const ptx::Float4 numbers = {acc_dq[i], acc_dq[i + 1], acc_dq[i + 2], acc_dq[i + 3]};
      if (adds_in_order()) {
        ptx::reduce_add_alone(to + i * kWarpgroupThreads, numbers);
      } else {
        ptx::reduce_add(to + i * kWarpgroupThreads, numbers);
      }
    }
  }

  __device__ __forceinline__ void store_key_gradients() const {
    const tile::SequenceRows rows = {work.start_k, work.rows_k};
    const int entry = problem.cu_seqlens_q ? 0 : work.batch + pass, column = consumer * kColumns;
    const auto own = [&](MutableTensorView view) {
      if (view.data) view.data = static_cast<T*>(view.data) + column;
      return view;
    };
    store_rows<T, kColumns>(own(problem.dk), entry, work.head_kv, rows, work.n0,
                            problem.head_dim - column, problem.softmax_scale, acc_dk);
    store_rows<T, kColumns>(own(problem.dv), entry, work.head_kv, rows, work.n0,
                            problem.head_dim_v - column, 1.0f, acc_dv);
  }
};

}  // namespace dlattn::backward_sm90
