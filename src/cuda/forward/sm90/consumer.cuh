#pragma once

#include "cuda/forward/sm90/epilogue.cuh"
#include "cuda/forward/sm90/products.cuh"
#include "cuda/forward/sm90/row_parts.cuh"
#include "cuda/forward/sm90/score.cuh"
#include "cuda/forward/sm90/setup.cuh"
#include "cuda/forward/sm90/softmax.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/head_groups.cuh"
#include "cuda/tile/wgmma/key_walk.cuh"
#include "cuda/tile/wgmma/mask.cuh"
#include "cuda/tile/wgmma/work_tile.cuh"

namespace dlattn::sm90 {

// A consumer warpgroup: it computes its 64 query rows of one work tile after the other. A step
// starts S = Q K^T of the next key tile, then O += P V of this one, and computes the next tile's
// probabilities while P V runs. Without kPipelined it finishes P V first, which takes fewer
// registers. With two groups of keys it takes every other tile of keys, and its results are merged
// with those of the consumer that takes the others. kVarlen: the producer tells it the work tiles;
// kOrFixed: those of a problem of fixed lengths too.
template <typename T, bool kVarlen, int kHeadDim, int kHeadDimV, Variant kVariant,
          bool kOrFixed = false>
struct Consumer {
  using SharedParts = Shared<kHeadDim, kHeadDimV, kVariant>;

  __device__ __forceinline__ Consumer(const AttentionParams& params, const LaunchShape& shape,
                                      const KernelArgs& args, const SharedParts& shared,
                                      int consumer)
      : params(params),
        shape(shape),
        args(args),
        shared(shared),
        row_group(kKeyGroups == 1 ? consumer : consumer % row_groups(kShape)),
        key_group(kKeyGroups == 1 ? 0 : consumer / row_groups(kShape)),
        scheduler{shape, args.num_work_tiles},
        first_lane(threadIdx.x % 32 == 0),
        ping_pong{consumer},
        fixed_mask(tile::wgmma::position_mask(params, shape, tile::fixed_lengths(params))),
        scale(score_scale<kScoreMod>(params, shape)),
        bias_mask(args.score, shared, consumer),
        use(static_cast<unsigned>(key_group)) {}

  __device__ __forceinline__ void run() {
    ping_pong.begin();
    if constexpr (kFindsNextEarly) find(0);
    for (; kToldTiles || is_told_tiles() || is_tile(); ++query_use) {
      tile::SequenceTile work;
      if (kToldTiles || is_told_tiles()) {
        work = tile::wgmma::received_tile(shared, query_use);
        if (work.seqlen_q == 0) break;
      } else if constexpr (kFindsNextEarly) {
        work = tile::fixed_lengths(params, next);
      } else {
        work = tile::fixed_lengths(
            params, tile::scheduled_tile(shape, args.heads, scheduler.index(query_use)));
      }
      const TileWalk walk = walk_of(work);
      TileScoreMod score_mod(params, shape, args.score, work, scale, bias_mask);
      begin(walk, score_mod);
#pragma unroll 1
      // seed: key-loop
      for (int n = own_tile(walk, walk.tiles.end - 1) - kKeyGroups; n >= walk.tiles.begin;
           n -= kKeyGroups)
        step(walk, n, score_mod);
      if (kFromRegisters) release(shared.queries, query_use);
      end(walk, score_mod);
    }
    ping_pong.end();
  }

 private:
  static constexpr TileShape kShape = tile_shape(kHeadDim, kHeadDimV, kVariant);
  static constexpr ScoreMod kScoreMod = score_mod_of(kVariant);
  // Whether the producer always tells it the work tiles.
  static constexpr bool kToldTiles = kVarlen && !serves_all_lengths(kVariant);
  static constexpr int kKeyGroups = kShape.key_groups;
  static constexpr int kBlockN = kShape.block_n;
  static constexpr bool kPipelined = kShape.pipelined;
  static constexpr bool kFromRegisters = stores_from_registers(kHeadDim, kVariant);
  static constexpr bool kFindsNextEarly = !kVarlen && finds_next_early(kHeadDim, kVariant);
  using TileWalk = tile::wgmma::KeyWalk<block_m(kShape), kBlockN>;
  using TileScoreMod = LaneScoreMod<T, kScoreMod>;

  const AttentionParams& params;
  const LaunchShape& shape;
  const KernelArgs& args;
  const SharedParts& shared;
  const int row_group, key_group;
  const tile::RoundRobin scheduler;
  const bool first_lane;
  const PingPong<kShape.num_consumers, kShape.ping_pong> ping_pong;
  // With fixed lengths the same for all work tiles. Computed for each it would take one more
  // register.
  const tile::Mask fixed_mask;
  const float scale;  // of scores before ALiBi, to base 2
  BiasMaskSource<kScoreMod> bias_mask;
  unsigned use;            // of the stages of K and V: that of this consumer's tile at hand
  unsigned query_use = 0;  // uses so far of Q's stages: one for each work tile

  unsigned next_index;  // of the next work tile, and which it is; with kFindsNextEarly alone
  tile::WorkTile next;

  float acc_o[kHeadDimV / 2];
  float acc_s[kBlockN / 2];
  std::uint32_t rP[kBlockN / 16][4];
  Softmax softmax;

  // Where it may be either, fixed lengths' work tiles are known before their Q is there.
  __device__ __forceinline__ bool is_told_tiles() const {
    return serves_all_lengths(kVariant) && params.cu_seqlens_q != nullptr;
  }

  __device__ __forceinline__ TileWalk walk_of(const tile::SequenceTile& work) const {
    return {work, kVarlen ? tile::wgmma::position_mask(params, shape, work) : fixed_mask,
            row_group};
  }

  // Whether there is a work tile of this round, where the producer does not tell.
  __device__ __forceinline__ bool is_tile() const {
    return (kFindsNextEarly ? next_index : scheduler.index(query_use)) < scheduler.count;
  }
  __device__ __forceinline__ void find(unsigned round) {
    next_index = scheduler.index(round);
    next = tile::scheduled_tile(shape, args.heads, next_index);
  }
  // Found at this place: what is worked out later would be waited for.
  __device__ __forceinline__ void find_next_early() {
    if constexpr (kFindsNextEarly) {
      find(query_use + 1);
      const auto here = [](int x) {
        return static_cast<int>(ptx::reread(static_cast<unsigned>(x)));
      };
      next = {here(next.m_block), here(next.head), here(next.batch)};
    }
  }

  // By a warp that has done with a stage. Those of K and V are filled again by both blocks of a
  // pair, each of which waits for the warps of both; Q's are a block's own.
  template <int kStages>
  __device__ __forceinline__ void release(const tile::Ring<kStages>& ring, unsigned use) const {
    if constexpr (cluster_blocks(kVariant) > 1 && kStages == kShape.num_stages) {
      static_assert(kShape.num_stages != kShape.query_stages, "tells the rings apart");
      const unsigned rank = threadIdx.x % 32;
      if (rank < cluster_blocks(kVariant))
        ptx::mbarrier_arrive_at_block(ring.empty_barrier(use), rank);
    } else {
      if (first_lane) ring.release(use);
    }
  }

  // The last tile up to `n` that is of this consumer's group of keys.
  __device__ __forceinline__ int own_tile(const TileWalk& walk, int n) const {
    if constexpr (kKeyGroups == 1) return n;
    return n - (walk.all.end - 1 - n + key_group) % kKeyGroups;
  }
  // Whether it sees any tile of its group.
  __device__ __forceinline__ bool sees_any(const TileWalk& walk) const {
    return walk.sees_any() && own_tile(walk, walk.tiles.end - 1) >= walk.tiles.begin;
  }

  // Takes part in the barriers of a key tile that only other consumers see.
  __device__ __forceinline__ void pass_over() {
    ping_pong.wait();
    ping_pong.pass();
    shared.keys.wait_full(use);
    release(shared.keys, use);
    shared.values.wait_full(use);
    release(shared.values, use);
    use += kKeyGroups;
  }

  // Has both groups of keys count uses from the same one again, and keeps them in step, after a
  // walk of which the first group had a tile more.
  __device__ __forceinline__ void even_out(const TileWalk& walk) {
    if ((walk.all.end - walk.all.begin) % kKeyGroups == 0) return;
    if (key_group == 0) {
      --use;
      return;
    }
    // seed: even-out
    ++use;
    ping_pong.wait();
    ping_pong.pass();
  }

  // Up to the probabilities of the first key tile.
  __device__ __forceinline__ void begin(const TileWalk& walk, TileScoreMod& score_mod) {
    if constexpr (!kVarlen || serves_all_lengths(kVariant)) shared.queries.wait_full(query_use);
#pragma unroll 1
    for (int n = own_tile(walk, walk.all.end - 1); n >= walk.all.begin && n >= walk.tiles.end;
         n -= kKeyGroups)
      pass_over();
    softmax = Softmax();
    if (sees_any(walk)) begin_first(walk, score_mod);
    // Cleared last, so that these registers are free until here.
#pragma unroll
    for (int d = 0; d < kHeadDimV / 2; ++d) acc_o[d] = 0.0f;
  }

  __device__ __forceinline__ void begin_first(const TileWalk& walk, TileScoreMod& score_mod) {
    const int n = own_tile(walk, walk.tiles.end - 1);
    shared.keys.wait_full(use);
    ping_pong.wait();
    start_qk<T, kHeadDim, kBlockN>(acc_s, shared.q(query_use, row_group), shared.k(use));
    ping_pong.pass();
    ptx::wgmma_wait<0>();
    release(shared.keys, use);
    if constexpr (kScoreMod == ScoreMod::kNone) {
      hide_unseen(walk, n);
      float sums[2], probabilities[kBlockN / 2];
      softmax.begin(acc_s, score_mod.scale, probabilities, sums);
      tile::wgmma::pack_probabilities<T>(rP, probabilities);
    } else {
      bias_mask.wait_full();
      float sums[2], factors[2];
      exponentiate_modified(n, walk, score_mod, true, sums, factors);
      bias_mask.release();
      softmax.add(sums);
      tile::wgmma::pack_probabilities<T>(rP, acc_s);
    }
  }

  // O += P V of the tile whose probabilities are in rP.
  __device__ __forceinline__ void start_values() {
    shared.values.wait_full(use);
    start_pv<T, kHeadDimV, kBlockN>(acc_o, rP, shared.v(use));
  }
  __device__ __forceinline__ void finish_values() {
    ptx::wgmma_wait<0>();
    release(shared.values, use);
  }

  // S and probabilities of tile n, whose K has use + kKeyGroups, and P V of the tile walked before
  // it.
  __device__ __forceinline__ void step(const TileWalk& walk, int n, TileScoreMod& score_mod) {
    if constexpr (!kPipelined) start_values(), finish_values();
    const ptx::SmemAddress sQ = shared.q(query_use, row_group);
    shared.keys.wait_full(use + kKeyGroups);
    ping_pong.wait();
    start_qk<T, kHeadDim, kBlockN>(acc_s, sQ, shared.k(use + kKeyGroups));
    if constexpr (kPipelined) start_values();
    ping_pong.pass();
    ptx::wgmma_wait<kPipelined ? 1 : 0>();
    // seed: bias-mask-wait
    bias_mask.wait_full();
    float sums[2], factors[2];
    const bool raised = exponentiate(n, sQ, walk, score_mod, sums, factors);
    release(shared.keys, use + kKeyGroups);
    bias_mask.release();
    // seed: finish-values
    softmax.add(sums);
    if constexpr (kPipelined) finish_values();
    // seed: rescale-output
    if (raised) tile::wgmma::rescale(acc_o, factors);
    tile::wgmma::pack_probabilities<T>(rP,
                                       acc_s);  // only now: products in flight may still read rP
    use += kKeyGroups;
  }

  __device__ __forceinline__ void hide_unseen(const TileWalk& walk, int n) {
    if (walk.is_edge(n)) tile::wgmma::apply_mask(acc_s, walk.mask, walk.first_row, n * kBlockN);
  }

  // Turns tile n's scores into probabilities and their sums. Returns whether row maxima rose; then
  // `factors` is what the output must be multiplied with.
  __device__ __forceinline__ bool exponentiate(int n, ptx::SmemAddress sQ, const TileWalk& walk,
                                               TileScoreMod& score_mod, float (&sums)[2],
                                               float (&factors)[2]) {
    bool raises = softmax.raises_first();  // else the sums tell whether the row maxima fit
    bool raised = raises;
    if constexpr (kScoreMod != ScoreMod::kNone) {
      int tile = n;
      // A tile may go through the same code again, which is long.
#pragma unroll 1
      while (true) {
        exponentiate_modified(tile, walk, score_mod, raises, sums, factors);
        // The first of these branches also keeps the compiler from waiting for the product with V.
        // seed: modified-overflow
        if (raises || !softmax.overflows(sums)) break;
        raised = true;
        if (softmax.scale_down(acc_s, sums, factors)) break;
        recompute_scores<T, kHeadDim, kBlockN>(acc_s, sQ, shared.k(use + kKeyGroups));
        score_mod.expect_larger(softmax);
        raises = true;
        // Taken for another tile, so that no registers keep what is worked out from it.
        tile = static_cast<int>(ptx::reread(static_cast<unsigned>(n)));
      }
      return raised;
    }
    if (__builtin_expect(!raises, 1)) {
      hide_unseen(walk, n);
      score_mod.exponentiate(acc_s, softmax, sums);
      // This branch also keeps the compiler from waiting for the product with V any earlier.
      // seed: overflow
      if (softmax.overflows(sums)) {
        raised = true;
        raises = !softmax.scale_down(acc_s, sums, factors);
        if (raises) recompute_scores<T, kHeadDim, kBlockN>(acc_s, sQ, shared.k(use + kKeyGroups));
      }
    }
    if (__builtin_expect(raises, 0)) {
      // seed: recompute-scores
      hide_unseen(walk, n);
      softmax.raise(acc_s, score_mod.scale, factors);
      softmax.exponentiate_raised(acc_s, score_mod.scale, sums);
      softmax.expect_overflow(factors);
    }
    return raised;
  }

  // Modifies tile n's scores and turns them into probabilities and their sums. Where `raises`, row
  // maxima rise to those of the scores first; else what the sums tell is left to the caller.
  __device__ __forceinline__ void exponentiate_modified(int n, const TileWalk& walk,
                                                        TileScoreMod& score_mod, bool raises,
                                                        float (&sums)[2], float (&factors)[2]) {
    // seed: modify-scores
    score_mod.apply(acc_s, softmax, walk.position(n), walk.is_edge(n), raises);
    hide_unseen(walk, n);
    if (raises)
      softmax.raise_any(acc_s, score_mod.scale, score_mod.may_hide_tiny_scores(), factors);
    score_mod.exponentiate(acc_s, softmax, sums);
  }

  // P V of the last tile, and the results.
  __device__ __forceinline__ void end(const TileWalk& walk, const TileScoreMod& score_mod) {
    if (sees_any(walk)) {
      start_values();
      find_next_early();
      finish_values();
      use += kKeyGroups;
    } else if constexpr (kFindsNextEarly) {
      find_next_early();
    }
#pragma unroll 1
    for (int n = own_tile(walk, walk.tiles.begin - 1); n >= walk.all.begin; n -= kKeyGroups)
      pass_over();
    if constexpr (kKeyGroups > 1) {
      even_out(walk);
      const RowParts<kHeadDimV> parts{shared.part(row_group), row_group};
      parts.merge(key_group > 0, softmax, score_mod.scale, acc_o);
      if (key_group > 0) {
        if (ThreadIndex().index == 0) shared.queries.release(query_use);
        return;
      }
    }
    // Where results go through Q's stage, that is not released yet, and its work tile is still in
    // shared memory: it is read again rather than kept in registers, which are scarce.
    const tile::SequenceTile work =
        kVarlen && !kFromRegisters ? *shared.work_tile(query_use) : walk.work;
    const tile::ResultRows<T> result(params, work);
    float scales[2];
    finish_rows(result, work, walk.first_row, softmax, score_mod.scale, scales);
    if constexpr (kFromRegisters) {
      store_from_registers<T, kHeadDimV>(params, result, work, walk.first_row, scales, acc_o);
    } else {
      const bool stored = store_results<T, kHeadDimV, kVarlen, kOrFixed>(
          params, args, work, walk.first_row, row_group, shared.q(query_use, row_group), scales,
          acc_o);
      if (stored) shared.queries.release(query_use);
    }
  }
};

}  // namespace dlattn::sm90
