#pragma once

#include "cuda/forward/sm90/epilogue.cuh"
#include "cuda/forward/sm90/products.cuh"
#include "cuda/forward/sm90/score.cuh"
#include "cuda/forward/sm90/setup.cuh"
#include "cuda/forward/sm90/softmax.cuh"
#include "cuda/forward/sm90/tiles.cuh"

namespace dlattn::sm90 {

// The item that comes with Q, the same in all lanes, and by this the compiler knows.
template <typename Shared>
__device__ __forceinline__ tile::SequenceTile received_item(const Shared& shared,
                                                            unsigned query_use) {
  shared.queries.wait_full(query_use);
  const auto uniform = [](int x) { return __shfl_sync(tile::kFullMask, x, 0); };
  const tile::SequenceTile item = *shared.item(query_use);
  __syncwarp();  // one lane will release it for all
  return {{uniform(item.m_block), item.head, item.batch},
          item.start_q,
          uniform(item.seqlen_q),
          uniform(item.seqlen_k)};
}

// A consumer's way through one work item.
template <int kBlockM, int kBlockN>
struct Walk {
  tile::SequenceTile item;
  tile::Mask mask;
  int first_row;      // the consumer's
  tile::Range all;    // of tiles that a consumer of the block sees
  tile::Range tiles;  // that this one sees
  tile::Range whole;  // that all its rows do

  __device__ __forceinline__ Walk(const tile::SequenceTile& item, const tile::Mask& mask,
                                  int consumer)
      : item(item),
        mask(mask),
        first_row(item.m_block * kBlockM + consumer * kWarpgroupRows),
        all(visible_tiles(mask, item.m_block * kBlockM,
                          min(item.m_block * kBlockM + kBlockM, item.seqlen_q) - 1, kBlockN)),
        tiles(visible_tiles(mask, first_row, min(first_row + kWarpgroupRows, item.seqlen_q) - 1,
                            kBlockN)),
        whole(whole_tiles(mask, first_row, kBlockN)) {}

  __device__ __forceinline__ bool sees_any() const { return tiles.begin < tiles.end; }
  // Of the consumer's first row, counted from tile n's first key.
  __device__ __forceinline__ int position(int n) const {
    return mask.position(first_row) - n * kBlockN;
  }
  __device__ __forceinline__ bool is_edge(int n) const { return n < whole.begin || n >= whole.end; }
};

// A consumer warpgroup's 64 query rows of one work item after the other. A step starts the scores
// of the next tile ahead of this tile's product with V, and works out the probabilities of the
// former while the latter runs; unless consumers do not run ahead, which takes fewer registers.
template <typename T, bool kVarlen, int kHeadDim, int kHeadDimV, Terms kTerms>
struct Consumer {
  using SharedParts = Shared<kHeadDim, kHeadDimV, kTerms>;

  __device__ __forceinline__ Consumer(const AttentionParams& params, const LaunchShape& shape,
                                      const Launch& launch, const SharedParts& shared, int consumer)
      : params(params),
        shape(shape),
        launch(launch),
        shared(shared),
        consumer(consumer),
        scheduler{shape, launch.num_items},
        first_lane(threadIdx.x % 32 == 0),
        turns{consumer},
        fixed_mask(position_mask(params, shape, tile::fixed_lengths(params))),
        scale(score_scale<kTerms>(params, shape)),
        loaded(launch.score, shared, consumer) {}

  __device__ __forceinline__ void run() {
    turns.begin();
    for (; kVarlen || scheduler.index(query_use) < scheduler.count; ++query_use) {
      tile::SequenceTile item;
      if constexpr (kVarlen) {
        item = received_item(shared, query_use);
        if (item.seqlen_q == 0) break;
      } else {
        item = tile::fixed_lengths(params, scheduler.tile(scheduler.index(query_use)));
      }
      const ItemWalk walk = walk_of(item);
      ItemTerms terms(params, shape, launch.score, item, loaded);
      begin(walk, terms);
#pragma unroll 1
      for (int n = walk.tiles.end - 2; n >= walk.tiles.begin; --n) step(walk, n, terms);
      if (kFromRegisters) release(shared.queries, query_use);
      end(walk);
    }
    turns.end();
  }

 private:
  static constexpr TileShape kShape = tile_shape(kHeadDim, kHeadDimV, kTerms);
  static constexpr int kBlockN = kShape.block_n;
  static constexpr bool kRunsAhead = kShape.runs_ahead;
  static constexpr bool kFromRegisters = stores_from_registers(kHeadDim, kTerms);
  using ItemWalk = Walk<block_m(kShape), kBlockN>;
  using ItemTerms = LaneTerms<T, kTerms>;

  const AttentionParams& params;
  const LaunchShape& shape;
  const Launch& launch;
  const SharedParts& shared;
  const int consumer;
  const tile::RoundRobin scheduler;
  const bool first_lane;
  const Turns<kShape.num_consumers, kShape.takes_turns> turns;
  // Of one length for all, so not worked out for every item, where it takes a register more.
  const tile::Mask fixed_mask;
  const float scale;
  TermTiles<kTerms> loaded;
  unsigned use = 0;        // of the stages of K and V
  unsigned query_use = 0;  // of those of Q: a round of items each

  float acc_o[kHeadDimV / 2];
  float acc_s[kBlockN / 2];
  std::uint32_t rP[kBlockN / 16][4];
  Softmax softmax;

  __device__ __forceinline__ ItemWalk walk_of(const tile::SequenceTile& item) const {
    return {item, kVarlen ? position_mask(params, shape, item) : fixed_mask, consumer};
  }

  template <typename Stages>
  __device__ __forceinline__ void release(const Stages& ring, unsigned use) const {
    if (first_lane) ring.release(use);
  }

  // A tile that other consumers see.
  __device__ __forceinline__ void pass_over() {
    turns.wait();
    turns.pass();
    shared.keys.wait_full(use);
    release(shared.keys, use);
    shared.values.wait_full(use);
    release(shared.values, use);
    ++use;
  }

  // As far as the first tile's probabilities.
  __device__ __forceinline__ void begin(const ItemWalk& walk, ItemTerms& terms) {
    if constexpr (!kVarlen) shared.queries.wait_full(query_use);
#pragma unroll 1
    for (int n = walk.all.end - 1; n >= walk.all.begin && n >= walk.tiles.end; --n) pass_over();
    softmax = Softmax();
    if (walk.sees_any()) begin_first(walk, terms);
    // Only now: till here there may be something else in these registers.
#pragma unroll
    for (int d = 0; d < kHeadDimV / 2; ++d) acc_o[d] = 0.0f;
  }

  __device__ __forceinline__ void begin_first(const ItemWalk& walk, ItemTerms& terms) {
    const int n = walk.tiles.end - 1;
    shared.keys.wait_full(use);
    turns.wait();
    start_qk<T, kHeadDim, kBlockN>(acc_s, shared.q(query_use, consumer), shared.k(use));
    turns.pass();
    ptx::wgmma_wait<0>();
    release(shared.keys, use);
    loaded.wait_full();
    terms.apply(acc_s, walk.position(n));
    loaded.release();
    if (walk.is_edge(n)) apply_mask(acc_s, walk.mask, walk.first_row, n * kBlockN);
    float sums[2];
    if constexpr (kTerms == Terms::kNone) {
      float probabilities[kBlockN / 2];
      softmax.begin(acc_s, scale, probabilities, sums);
      pack_probabilities<T>(rP, probabilities);
    } else {
      float factors[2];
      raise(terms, sums, factors);
      softmax.add(sums);
      pack_probabilities<T>(rP, acc_s);
    }
  }

  // Raises references to the maxima of the tile's scores first.
  __device__ __forceinline__ void raise(const ItemTerms& terms, float (&sums)[2],
                                        float (&factors)[2]) {
    if constexpr (kTerms == Terms::kNone) {
      softmax.raise(acc_s, scale, factors);
    } else {
      softmax.raise_any(acc_s, scale, terms.faint(), factors);
    }
    softmax.exponentiate_raised(acc_s, scale, sums);
  }

  // The product with V of the tile before.
  __device__ __forceinline__ void start_values() {
    shared.values.wait_full(use);
    start_pv<T, kHeadDimV, kBlockN>(acc_o, rP, shared.v(use));
  }
  __device__ __forceinline__ void finish_values() {
    ptx::wgmma_wait<0>();
    release(shared.values, use);
  }

  // Tile n, whose K is that of use + 1, and the product with V of the one before it in the walk.
  __device__ __forceinline__ void step(const ItemWalk& walk, int n, ItemTerms& terms) {
    if constexpr (!kRunsAhead) start_values(), finish_values();
    const ptx::SmemAddress sQ = shared.q(query_use, consumer);
    shared.keys.wait_full(use + 1);
    turns.wait();
    start_qk<T, kHeadDim, kBlockN>(acc_s, sQ, shared.k(use + 1));
    if constexpr (kRunsAhead) start_values();
    turns.pass();
    ptx::wgmma_wait<kRunsAhead ? 1 : 0>();
    loaded.wait_full();
    float sums[2], factors[2];
    const bool raised = exponentiate(n, sQ, walk, terms, sums, factors);
    release(shared.keys, use + 1);
    loaded.release();
    softmax.add(sums);
    if constexpr (kRunsAhead) finish_values();
    if (raised) rescale(acc_o, factors);
    pack_probabilities<T>(rP, acc_s);  // only now: products in flight may still read rP
    ++use;
  }

  __device__ __forceinline__ void hide_unseen(const ItemWalk& walk, int n) {
    if (walk.is_edge(n)) apply_mask(acc_s, walk.mask, walk.first_row, n * kBlockN);
  }

  // Tile n's scores, whose product is done, to probabilities and their sums. Returns whether
  // references were raised: `factors` then.
  __device__ __forceinline__ bool exponentiate(int n, ptx::SmemAddress sQ, const ItemWalk& walk,
                                               ItemTerms& terms, float (&sums)[2],
                                               float (&factors)[2]) {
    bool raises = softmax.raises_first();  // else sums tell whether references hold
    bool raised = raises;
    if (__builtin_expect(!raises, 1)) {
      terms.apply_quickly(acc_s, softmax, walk.position(n), walk.is_edge(n));
      hide_unseen(walk, n);
      terms.exponentiate(acc_s, softmax, scale, sums);
      // This branch also keeps the compiler from waiting for the product with V any earlier.
      if (softmax.outgrown(sums)) {
        raised = true;
        raises = !softmax.scale_down(acc_s, sums, factors);
        if (raises) {
          recompute_scores<T, kHeadDim, kBlockN>(acc_s, sQ, shared.k(use + 1));
          terms.expect_larger(softmax);
        }
      }
    }
    if (__builtin_expect(raises, 0)) {
      terms.apply(acc_s, walk.position(n));
      hide_unseen(walk, n);
      raise(terms, sums, factors);
      if constexpr (terms.kMayLeap) softmax.expect_leaps(factors);
    }
    return raised;
  }

  // The last tile's product with V, and results.
  __device__ __forceinline__ void end(const ItemWalk& walk) {
    if (walk.sees_any()) {
      start_values();
      finish_values();
      ++use;
    }
#pragma unroll 1
    for (int n = walk.tiles.begin - 1; n >= walk.all.begin; --n) pass_over();
    // A varlen item is in shared memory as long as Q's stage. Where results go by way of that, the
    // item need not be in registers till here: those are scarce.
    const tile::SequenceTile item =
        kVarlen && !kFromRegisters ? *shared.item(query_use) : walk.item;
    const tile::ResultRows<T> result(params, item);
    float scales[2];
    finish_rows(result, item, walk.first_row, softmax, scale, scales);
    if constexpr (kFromRegisters) {
      store_from_registers<T, kHeadDimV>(params, result, item, walk.first_row, scales, acc_o);
    } else {
      const bool stored =
          store_results<T, kHeadDimV, kVarlen>(params, launch, item, walk.first_row, consumer,
                                               shared.q(query_use, consumer), scales, acc_o);
      if (stored) shared.queries.release(query_use);
    }
  }
};

}  // namespace dlattn::sm90
