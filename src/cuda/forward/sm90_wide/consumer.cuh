#pragma once

#include <utility>

#include "cuda/forward/sm90_wide/products.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/quad_rows.cuh"
#include "cuda/tile/wgmma/slack_softmax.cuh"
#include "cuda/tile/wgmma/thread_index.cuh"

namespace dlattn::sm90_wide {

// A consumer warpgroup: the block's 64 rows, and half of the columns of out. It computes the
// probabilities of every other tile of keys, its own, and adds up the values of all tiles in their
// order, so that both consumers have the same row maxima all the time.
template <typename T, int kTile>
struct Consumer {
  static constexpr int kKeySlots = key_slots(kTile), kHalf = half_of(kTile);
  using Shared = sm90_wide::Shared<kTile>;

  const AttentionParams& params;
  const LaunchShape& shape;
  const Shared shared;
  const int consumer;
  const Stream<kTile> stream;
  const TileWalk walk;
  const int count;  // tiles of the walk, and of these [begin, end) that this block's rows see
  int begin, end;
  unsigned position = 0;  // in the stream, of the own tile's keys

  float acc_o[kHalf / 2];
  float acc_s[kBlockN / 2];
  std::uint32_t rP[kSteps][4];
  tile::OnlineSoftmax softmax[2];  // of rows lane / 4 and lane / 4 + 8 of the warp's

  __device__ __forceinline__ Consumer(const AttentionParams& params, const LaunchShape& shape,
                                      const Shared& shared, int consumer)
      : params(params),
        shape(shape),
        shared(shared),
        consumer(consumer),
        stream(shared.stream(consumer)),
        walk(walk_of(params, shape, work_tile(params, shape))),
        count(walk.all.end - walk.all.begin) {
    const bool sees_any = walk.sees_any();
    begin = sees_any ? walk.all.end - walk.tiles.end : count;
    end = sees_any ? walk.all.end - walk.tiles.begin : count;
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (float& x : acc_o) x = 0.0f;
    // Rows without keys wait too: no copy may be in flight at the block's end.
    ptx::mbarrier_sleep(shared.queries_full(), 0);
#pragma unroll 1
    for (int own = consumer; own <= count; own += kConsumers) step(own);
    store();
  }

 private:
  __device__ __forceinline__ bool sees(int i) const { return i >= begin && i < end; }

  // An own tile, and the other consumer's before it. It begins and ends with nothing in flight: the
  // other consumer's products run meanwhile. What only the cluster's other block sees is passed
  // over.
  __device__ __forceinline__ void step(int own) {
    const bool exists = own < count;
    const unsigned keys = position, other_values = keys + (exists ? kKeySlots : 0),
                   own_values = other_values + (own > 0 ? kSteps : 0);
    if (sees(own)) {
      compute_scores(keys);
    } else if (exists) {
      pass_over<kKeySlots>(keys);
    }
    if (sees(own - 1)) {
      start_other(other_values);
    } else if (own > 0) {
      pass_over<kSteps>(other_values);
    }
    if (sees(own)) {
      finish_own(own, other_values, own_values);
    } else {
      ptx::wgmma_wait<0>();
      if (sees(own - 1)) release<kSteps>(other_values);
      if (exists) pass_over<kSteps>(own_values);
    }
    position = own_values + kSteps;
  }

  template <int kCount>
  __device__ __forceinline__ void release(unsigned first) const {
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) stream.release(first + i);
  }
  template <int kCount>
  __device__ __forceinline__ void pass_over(unsigned first) const {
#pragma unroll 1
    for (unsigned i = 0; i < kCount; ++i) {
      stream.wait_full(first + i);
      __syncwarp();  // no lane may come late, when the slot has been used twice again
      stream.release(first + i);
    }
  }

  // Calls run(0), run(1), ... with compile-time constants as one group of products after the other
  // is complete, of kGroups in flight. ptxas keeps several groups in flight so: if they are waited
  // for one by one at the end, and not among the products (it says so where it does not).
  template <int kGroups, typename Run>
  __device__ __forceinline__ static void wait_each(Run run) {
    wait_each(run, std::make_integer_sequence<int, kGroups>());
  }
  template <typename Run, int... kIndices>
  __device__ __forceinline__ static void wait_each(Run run,
                                                   std::integer_sequence<int, kIndices...>) {
    ((ptx::wgmma_wait<static_cast<int>(sizeof...(kIndices)) - 1 - kIndices>(),
      run(static_cast<unsigned>(kIndices))),
     ...);
  }

  // S = Q K^T of an own tile, as its columns arrive.
  __device__ __forceinline__ void compute_scores(unsigned keys) {
#pragma unroll
    for (unsigned b = 0; b < kKeySlots; ++b) {
      stream.wait_full(keys + b);
      start_scores<T>(acc_s, shared, static_cast<int>(b), stream.slot(keys + b));
    }
    wait_each<kKeySlots>([&](unsigned b) { stream.release(keys + b); });
  }

  // O += P V of a tile of the other consumer's.
  __device__ __forceinline__ void start_other(unsigned values) {
    const int owner = 1 - consumer;
    ptx::barrier_sync(kReadyBarrier + owner, kConsumers * kWarpgroupThreads);
    const float maxima[2] = {Shared::row_max(owner)[row_of_block(0)],
                             Shared::row_max(owner)[row_of_block(1)]};
    tile::wgmma::raise(softmax, maxima, scale(), acc_o);
#pragma unroll
    for (unsigned step = 0; step < kSteps; ++step) {
      stream.wait_full(values + step);
      start_other_values<T>(acc_o, shared, owner, static_cast<int>(step),
                            stream.slot(values + step));
    }
  }

  // P of an own tile, from its scores, under the product with the values of the tile before; then
  // O += P V is started, and P handed over.
  __device__ __forceinline__ void finish_own(int i, unsigned other_values, unsigned own_values) {
    const int n = walk.all.end - 1 - i;
    if (walk.is_edge(n)) tile::wgmma::apply_mask(acc_s, walk.mask, walk.first_row, n * kBlockN);
    const float maxima[2] = {tile::wgmma::raised_max(acc_s, softmax[0], 0, scale()),
                             tile::wgmma::raised_max(acc_s, softmax[1], 1, scale())};
    tile::wgmma::make_probabilities(acc_s, maxima, scale());
    const float sums[2] = {tile::wgmma::sum_of_row(acc_s, 0), tile::wgmma::sum_of_row(acc_s, 1)};
    tile::wgmma::pack_probabilities<T>(rP, acc_s);
    ptx::wgmma_wait<0>();
    if (i > begin) release<kSteps>(other_values);
    tile::wgmma::raise(softmax, maxima, scale(), acc_o);
#pragma unroll
    for (int h = 0; h < 2; ++h) softmax[h].row_sum += sums[h];
#pragma unroll
    for (unsigned step = 0; step < kSteps; ++step) {
      stream.wait_full(own_values + step);
      start_own_values<T>(acc_o, rP[step], stream.slot(own_values + step));
    }
    // The other consumer has read the last ones: it has waited for that product, and then handed
    // over the probabilities that this one has waited for.
    const tile::wgmma::ThreadIndex thread;
    store_probabilities(rP, shared, consumer, thread.warp, thread.lane);
    if (thread.lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) Shared::row_max(consumer)[row_of_block(h)] = maxima[h];
    }
    ptx::fence_proxy_async();
    ptx::barrier_arrive(kReadyBarrier + consumer, kConsumers * kWarpgroupThreads);
    wait_each<kSteps>([&](unsigned step) { stream.release(own_values + step); });
  }

  // Stores the rows' results, each consumer its columns.
  __device__ __forceinline__ void store() {
    add_sums();
    const tile::wgmma::ThreadIndex thread;
    const tile::ResultRows<T> result(params, walk.work);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = walk.first_row + row_of_block(h);
      const bool exists = i < walk.work.seqlen_q;
      const tile::RowResult row = softmax[h].finalize(scale(), result.sink);
      if (result.lse && exists && consumer == 0 && thread.lane % 4 == 0) result.lse[i] = row.lse;
      const int first = consumer * kHalf + thread.lane % 4 * 8;
      const int columns = exists ? static_cast<int>(params.head_dim_v) - first : 0;
      tile::store_quad_row<T, kHalf>(result.out + i * params.out.row_stride + first, columns,
                                     row.scale, thread.lane,
                                     [&](int j) { return acc_o + 4 * j + 2 * h; });
    }
  }

  // Makes row_sum that of all tiles, the same in both consumers.
  __device__ __forceinline__ void add_sums() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      softmax[h].row_sum = tile::reduce_sum<4>(softmax[h].row_sum);
      if (threadIdx.x % 4 == 0) Shared::row_sum(consumer)[row_of_block(h)] = softmax[h].row_sum;
    }
    ptx::barrier_sync(kBothBarrier, kConsumers * kWarpgroupThreads);
    // In one order, so that both have the same bits.
#pragma unroll
    for (int h = 0; h < 2; ++h)
      softmax[h].row_sum =
          Shared::row_sum(0)[row_of_block(h)] + Shared::row_sum(1)[row_of_block(h)];
  }

  __device__ __forceinline__ float scale() const { return shape.scale_log2; }
  // This lane's row h, counted from the block's first.
  __device__ __forceinline__ static int row_of_block(int h) {
    const tile::wgmma::ThreadIndex thread;
    return thread.warp * 16 + 8 * h + thread.lane / 4;
  }
};

}  // namespace dlattn::sm90_wide
