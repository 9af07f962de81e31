#pragma once

#include "cuda/forward/sm90_latent/join.cuh"
#include "cuda/forward/sm90_latent/products.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/key_parts/parts.cuh"
#include "cuda/tile/quad_rows.cuh"
#include "cuda/tile/wgmma/mask.cuh"
#include "cuda/tile/wgmma/slack_softmax.cuh"
#include "cuda/tile/wgmma/thread_index.cuh"

namespace dlattn::sm90_latent {

// A consumer warpgroup: 64 rows of a KV head, and half of the columns of out. It computes the
// probabilities of every other tile of keys, its own, and adds up the values of all tiles in their
// order, so that both consumers have the same row maxima all the time.
template <typename T>
struct Consumer {
  const AttentionParams& params;
  const DecodeShape& shape;
  const Shared shared;
  const int consumer;
  unsigned use = 0;

  float acc_o[kHalf / 2];
  float acc_s[kBlockN / 2];
  std::uint32_t rP[kBlockN / 16][4];
  tile::OnlineSoftmax softmax[2];  // of rows lane / 4 and lane / 4 + 8 of the warp's

  __device__ __forceinline__ Consumer(const AttentionParams& params, const DecodeShape& shape,
                                      const Shared& shared, int consumer)
      : params(params), shape(shape), shared(shared), consumer(consumer) {}

  __device__ __forceinline__ void run() {
    for_each_segment(params, shape,
                     [&](const Segment& segment, const KeyMask& mask, int num_rows, bool joined) {
                       load_queries(segment, mask, num_rows);
                       attend(segment, mask, num_rows);
                       store(segment, mask, num_rows, joined);
                     });
  }

 private:
  // Both consumers together: the row block's rows of Q to shared memory. Rows and columns that
  // there are not are zeros.
  __device__ __forceinline__ void load_queries(const Segment& segment, const KeyMask& mask,
                                               int num_rows) const {
    constexpr int kRows = kConsumers * kWarpgroupThreads / 8;  // at a time, 8 lanes each
    const int thread = consumer * kWarpgroupThreads + tile::wgmma::ThreadIndex().index;
    const int chunk = thread % 8;
#pragma unroll 1
    for (int i = thread / 8; i < kBlockM; i += kRows) {
      const int row = segment.row_block * kBlockM + i;
      const T* const q = query_row<T>(params, shape, segment.sequence, segment.head_kv, mask,
                                      min(row, num_rows - 1));
      const ptx::SmemAddress to = shared.q() + i * kBlockRowBytes + (chunk ^ (i % 8)) * 16;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int column = block * kBlockColumns + chunk * 8;
        const bool exists = row < num_rows && column < params.head_dim;
        ptx::cp_async<16>(to + block * kBlockBytes, q + (exists ? column : 0), exists);
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::barrier_sync(kBothBarrier, kConsumers * kWarpgroupThreads);
  }

  // All tiles of a segment. A stage is released before the next one is waited for: it may be that
  // one's, whose copies the other consumer waits for too.
  __device__ __forceinline__ void attend(const Segment& segment, const KeyMask& mask,
                                         int num_rows) {
#pragma unroll
    for (float& x : acc_o) x = 0.0f;
    softmax[0] = softmax[1] = tile::OnlineSoftmax();
    const unsigned begin = use, end = use + static_cast<unsigned>(segment.count);
    const int m0 = segment.row_block * kBlockM;
    const tile::Range whole = mask.every_row(m0, min(m0 + kBlockM, num_rows) - 1);
#pragma unroll 1
    while (use < end) {
      if (Shared::owner(use) != consumer) {
        start_other();
        ptx::wgmma_wait<0>();
        release(1 - consumer);
        if (++use == end) break;
      }
      start_scores<T>(acc_s, shared, consumer, use);
      ptx::wgmma_wait<0>();
      const int n0 = (segment.tile + static_cast<int>(use - begin)) * kBlockN;
      if (!tile::contains_all(whole, n0, kBlockN)) tile::wgmma::apply_mask(acc_s, mask, m0, n0);
      finish_own();
      ++use;
    }
  }

  // O += P V of a tile of the other consumer's.
  __device__ __forceinline__ void start_other() {
    const int owner = 1 - consumer;
#pragma unroll
    for (int i = 0; i < kOwnBlocks; ++i) shared.wait_full(owner, use, consumer * kOwnBlocks + i);
    ptx::barrier_sync(kReadyBarrier + owner, kConsumers * kWarpgroupThreads);
    const float maxima[2] = {Shared::row_max(owner)[row_of_block(0)],
                             Shared::row_max(owner)[row_of_block(1)]};
    tile::wgmma::raise(softmax, maxima, scale(), acc_o);
    start_other_values<T>(acc_o, shared, consumer);
  }

  // P of an own tile, from its scores, and O += P V, which begins before the other consumer gets P:
  // then its product does not have to share the tensor cores.
  __device__ __forceinline__ void finish_own() {
    const float maxima[2] = {tile::wgmma::raised_max(acc_s, softmax[0], 0, scale()),
                             tile::wgmma::raised_max(acc_s, softmax[1], 1, scale())};
    tile::wgmma::raise(softmax, maxima, scale(), acc_o);
    tile::wgmma::make_probabilities(acc_s, maxima, scale());
    tile::wgmma::pack_probabilities<T>(rP, acc_s);
    start_own_values<T>(acc_o, rP, shared, consumer);
    // All four warps have their scores, whose product has read the rest block.
    ptx::barrier_sync(kOwnBarrier + consumer, kWarpgroupThreads);
    const tile::wgmma::ThreadIndex thread;
    store_probabilities(rP, shared, consumer, thread.warp, thread.lane);
    if (thread.lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) Shared::row_max(consumer)[row_of_block(h)] = maxima[h];
    }
    ptx::fence_proxy_async();
    ptx::barrier_arrive(kReadyBarrier + consumer, kConsumers * kWarpgroupThreads);
#pragma unroll
    for (int h = 0; h < 2; ++h) softmax[h].row_sum += tile::wgmma::sum_of_row(acc_s, h);
    ptx::wgmma_wait<0>();
    release(consumer);
  }

  __device__ __forceinline__ void release(int owner) const {
    // To the copying warps of both blocks that the columns come to. An arrival at the own block's
    // barrier by the way to others would be late.
    const unsigned lane = threadIdx.x % 32;
    const ptx::SmemAddress empty = shared.empty(owner, consumer);
    if (lane == 0) ptx::mbarrier_arrive(empty);
    if (lane == 1 && shape.pair_log2 > 0) ptx::mbarrier_arrive_at_block(empty, 1 - blockIdx.x % 2);
  }

  // Stores the rows' results, or where they are of some keys alone, leaves them in the workspace,
  // relative to row maxima in base 2.
  __device__ __forceinline__ void store(const Segment& segment, const KeyMask& mask, int num_rows,
                                        bool joined) {
    add_sums();
    if (joined) join(segment, num_rows);
    const tile::wgmma::ThreadIndex thread;
    const bool is_first = consumer == 0 && thread.lane % 4 == 0;
    const int kept = joined ? Join::rank() : 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = segment.row_block * kBlockM + row_of_block(h ^ kept);
      const bool exists = row < num_rows && !(joined && h > 0);
      if (segment.is_complete() || joined) {
        const int heads = static_cast<int>(shape.packed_heads.divisor());
        const int last = min(row, num_rows - 1), query = mask.query(last);
        const ResultRow<T> to(params, segment.sequence,
                              segment.head_kv * heads + last - query * heads, query);
        const tile::RowResult result = softmax[h].finalize(scale(), to.sink);
        if (to.lse && is_first && exists) *to.lse = result.lse;
        const int first = consumer * kHalf + thread.lane % 4 * 8;
        const int columns = exists ? static_cast<int>(params.head_dim_v) - first : 0;
        tile::store_quad_row<T, kHalf>(to.out + first, columns, result.scale, thread.lane,
                                       [&](int j) { return acc_o + 4 * j + 2 * h; });
      } else if (exists) {
        const std::int64_t at = std::int64_t{segment.part} * kBlockM + row_of_block(h);
        const float row_max = softmax[h].row_max * scale();
        const float factor = unrounded(softmax[h].row_max, scale());
        if (is_first)
          static_cast<PartStats*>(shape.stats)[at] = {row_max, softmax[h].row_sum * factor};
        float* const out = shape.outs + at * kWideValues + consumer * kHalf + thread.lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kHalf / 8; ++j) {
          const float pair[2] = {acc_o[4 * j + 2 * h] * factor, acc_o[4 * j + 2 * h + 1] * factor};
          tile::store(out + 8 * j, pair);
        }
      }
    }
  }

  // Joins the part with that of the cluster's other block, which has the rest of the keys, of the
  // warps whose rows exist. What a lane keeps is its first row then.
  __device__ __forceinline__ void join(const Segment& segment, int num_rows) {
    constexpr int kGroups = kHalf / 16;
    const tile::wgmma::ThreadIndex thread;
    const bool exists = segment.row_block * kBlockM + thread.warp * 16 < num_rows;
    const Join join{static_cast<int>(threadIdx.x) - kWarpgroupThreads, Shared::kMap.stages,
                    shared.join_ready(), shared.joined()};
    join.begin(exists ? kGroups + 1 : 0);
    if (!exists) return;  // in both
    join.wait_ready();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = 8 * i + e / 2 * 4 + e % 2;
        x[e] = Join::given(acc_o[at], acc_o[at + 2]);
      }
      join.give(i, x);
    }
    const float stats[4] = {Join::given(softmax[0].row_max, softmax[1].row_max),
                            Join::given(softmax[0].row_sum, softmax[1].row_sum)};
    join.give(kGroups, stats);
    join.wait_brought();
    tile::OnlineSoftmax& row = softmax[0];
    row.row_max = Join::kept(row.row_max, softmax[1].row_max);
    row.row_sum = Join::kept(row.row_sum, softmax[1].row_sum);
    float x[4];
    join.get(kGroups, x);
    const float factor = row.raise_max(x[0], scale()), weight = row.probability(x[0], scale());
    row.row_sum = fmaf(weight, x[1], row.row_sum);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      join.get(i, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = 8 * i + e / 2 * 4 + e % 2;
        acc_o[at] = fmaf(weight, x[e], factor * Join::kept(acc_o[at], acc_o[at + 2]));
      }
    }
  }
  using Join = Exchange<kConsumers * kWarpgroupThreads>;

  // Makes row_sum that of all tiles, the same in both consumers.
  __device__ __forceinline__ void add_sums() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      softmax[h].row_sum = tile::reduce_sum<4>(softmax[h].row_sum);
      if (threadIdx.x % 4 == 0) Shared::row_sum(consumer)[row_of_block(h)] = softmax[h].row_sum;
    }
    ptx::barrier_sync(kBothBarrier, kConsumers * kWarpgroupThreads);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      softmax[h].row_sum += Shared::row_sum(1 - consumer)[row_of_block(h)];
  }

  __device__ __forceinline__ float scale() const { return shape.scale_log2; }
  // This lane's row h, counted from the row block's first.
  __device__ __forceinline__ static int row_of_block(int h) {
    const tile::wgmma::ThreadIndex thread;
    return thread.warp * 16 + 8 * h + thread.lane / 4;
  }
};

}  // namespace dlattn::sm90_latent
