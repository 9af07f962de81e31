#pragma once

#include "cuda/forward/sm90/epilogue.cuh"
#include "cuda/forward/sm90/key_walk.cuh"
#include "cuda/forward/sm90/products.cuh"
#include "cuda/forward/sm90/score.cuh"
#include "cuda/forward/sm90/setup.cuh"
#include "cuda/forward/sm90/softmax.cuh"
#include "cuda/forward/sm90/tiles.cuh"

namespace dlattn::sm90 {

// A consumer warpgroup: it computes its 64 query rows of one work tile after the other. A step
// starts S = Q K^T of the next key tile, then O += P V of this one, and computes the next tile's
// probabilities while P V runs. Without kPipelined it finishes P V first, which takes fewer
// registers.
template <typename T, bool kVarlen, int kHeadDim, int kHeadDimV, ScoreMod kScoreMod>
struct Consumer {
  using SharedParts = Shared<kHeadDim, kHeadDimV, kScoreMod>;

  __device__ __forceinline__ Consumer(const AttentionParams& params, const LaunchShape& shape,
                                      const Launch& launch, const SharedParts& shared, int consumer)
      : params(params),
        shape(shape),
        launch(launch),
        shared(shared),
        consumer(consumer),
        scheduler{shape, launch.num_work_tiles},
        first_lane(threadIdx.x % 32 == 0),
        ping_pong{consumer},
        fixed_mask(position_mask(params, shape, tile::fixed_lengths(params))),
        scale(score_scale<kScoreMod>(params, shape)),
        bias_mask(launch.score, shared, consumer) {}

  __device__ __forceinline__ void run() {
    ping_pong.begin();
    for (; kVarlen || scheduler.index(query_use) < scheduler.count; ++query_use) {
      tile::SequenceTile work;
      if constexpr (kVarlen) {
        work = received_tile(shared, query_use);
        if (work.seqlen_q == 0) break;
      } else {
        work = tile::fixed_lengths(params, scheduler.tile(scheduler.index(query_use)));
      }
      const TileWalk walk = walk_of(work);
      TileScoreMod score_mod(params, shape, launch.score, work, bias_mask);
      begin(walk, score_mod);
#pragma unroll 1
      // seed: key-loop
      for (int n = walk.tiles.end - 2; n >= walk.tiles.begin; --n) step(walk, n, score_mod);
      if (kFromRegisters) release(shared.queries, query_use);
      end(walk);
    }
    ping_pong.end();
  }

 private:
  static constexpr TileShape kShape = tile_shape(kHeadDim, kHeadDimV, kScoreMod);
  static constexpr int kBlockN = kShape.block_n;
  static constexpr bool kPipelined = kShape.pipelined;
  static constexpr bool kFromRegisters = stores_from_registers(kHeadDim, kScoreMod);
  using TileWalk = KeyWalk<block_m(kShape), kBlockN>;
  using TileScoreMod = LaneScoreMod<T, kScoreMod>;

  const AttentionParams& params;
  const LaunchShape& shape;
  const Launch& launch;
  const SharedParts& shared;
  const int consumer;
  const tile::RoundRobin scheduler;
  const bool first_lane;
  const PingPong<kShape.num_consumers, kShape.ping_pong> ping_pong;
  // With fixed lengths the same for all work tiles. Computed for each it would take one more
  // register.
  const tile::Mask fixed_mask;
  const float scale;
  BiasMaskSource<kScoreMod> bias_mask;
  unsigned use = 0;        // uses so far of the stages of K and V
  unsigned query_use = 0;  // and of Q's: one for each work tile

  float acc_o[kHeadDimV / 2];
  float acc_s[kBlockN / 2];
  std::uint32_t rP[kBlockN / 16][4];
  Softmax softmax;

  __device__ __forceinline__ TileWalk walk_of(const tile::SequenceTile& work) const {
    return {work, kVarlen ? position_mask(params, shape, work) : fixed_mask, consumer};
  }

  template <typename Stages>
  __device__ __forceinline__ void release(const Stages& ring, unsigned use) const {
    if (first_lane) ring.release(use);
  }

  // Takes part in the barriers of a key tile that only other consumers see.
  __device__ __forceinline__ void pass_over() {
    ping_pong.wait();
    ping_pong.pass();
    shared.keys.wait_full(use);
    release(shared.keys, use);
    shared.values.wait_full(use);
    release(shared.values, use);
    ++use;
  }

  // Up to the probabilities of the first key tile.
  __device__ __forceinline__ void begin(const TileWalk& walk, TileScoreMod& score_mod) {
    if constexpr (!kVarlen) shared.queries.wait_full(query_use);
#pragma unroll 1
    for (int n = walk.all.end - 1; n >= walk.all.begin && n >= walk.tiles.end; --n) pass_over();
    softmax = Softmax();
    if (walk.sees_any()) begin_first(walk, score_mod);
    // Cleared last, so that these registers are free until here.
#pragma unroll
    for (int d = 0; d < kHeadDimV / 2; ++d) acc_o[d] = 0.0f;
  }

  __device__ __forceinline__ void begin_first(const TileWalk& walk, TileScoreMod& score_mod) {
    const int n = walk.tiles.end - 1;
    shared.keys.wait_full(use);
    ping_pong.wait();
    start_qk<T, kHeadDim, kBlockN>(acc_s, shared.q(query_use, consumer), shared.k(use));
    ping_pong.pass();
    ptx::wgmma_wait<0>();
    release(shared.keys, use);
    bias_mask.wait_full();
    score_mod.apply(acc_s, walk.position(n));
    bias_mask.release();
    if (walk.is_edge(n)) apply_mask(acc_s, walk.mask, walk.first_row, n * kBlockN);
    float sums[2];
    if constexpr (kScoreMod == ScoreMod::kNone) {
      float probabilities[kBlockN / 2];
      softmax.begin(acc_s, scale, probabilities, sums);
      pack_probabilities<T>(rP, probabilities);
    } else {
      float factors[2];
      raise(score_mod, sums, factors);
      softmax.add(sums);
      pack_probabilities<T>(rP, acc_s);
    }
  }

  // Raises the row maxima to those of the tile's scores, then computes probabilities.
  __device__ __forceinline__ void raise(const TileScoreMod& score_mod, float (&sums)[2],
                                        float (&factors)[2]) {
    if constexpr (kScoreMod == ScoreMod::kNone) {
      softmax.raise(acc_s, scale, factors);
    } else {
      softmax.raise_any(acc_s, scale, score_mod.faint(), factors);
    }
    softmax.exponentiate_raised(acc_s, scale, sums);
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

  // S and probabilities of tile n, whose K has use + 1, and P V of the tile walked before it.
  __device__ __forceinline__ void step(const TileWalk& walk, int n, TileScoreMod& score_mod) {
    if constexpr (!kPipelined) start_values(), finish_values();
    const ptx::SmemAddress sQ = shared.q(query_use, consumer);
    shared.keys.wait_full(use + 1);
    ping_pong.wait();
    start_qk<T, kHeadDim, kBlockN>(acc_s, sQ, shared.k(use + 1));
    if constexpr (kPipelined) start_values();
    ping_pong.pass();
    ptx::wgmma_wait<kPipelined ? 1 : 0>();
    // seed: bias-mask-wait
    bias_mask.wait_full();
    float sums[2], factors[2];
    const bool raised = exponentiate(n, sQ, walk, score_mod, sums, factors);
    release(shared.keys, use + 1);
    bias_mask.release();
    // seed: finish-values
    softmax.add(sums);
    if constexpr (kPipelined) finish_values();
    // seed: rescale-output
    if (raised) rescale(acc_o, factors);
    pack_probabilities<T>(rP, acc_s);  // only now: products in flight may still read rP
    ++use;
  }

  __device__ __forceinline__ void hide_unseen(const TileWalk& walk, int n) {
    if (walk.is_edge(n)) apply_mask(acc_s, walk.mask, walk.first_row, n * kBlockN);
  }

  // Turns tile n's scores into probabilities and their sums. Returns whether row maxima rose; then
  // `factors` is what the output must be multiplied with.
  __device__ __forceinline__ bool exponentiate(int n, ptx::SmemAddress sQ, const TileWalk& walk,
                                               TileScoreMod& score_mod, float (&sums)[2],
                                               float (&factors)[2]) {
    bool raises = softmax.raises_first();  // else the sums tell whether the row maxima fit
    bool raised = raises;
    if (__builtin_expect(!raises, 1)) {
      score_mod.apply_quickly(acc_s, softmax, walk.position(n), walk.is_edge(n));
      hide_unseen(walk, n);
      score_mod.exponentiate(acc_s, softmax, scale, sums);
      // This branch also keeps the compiler from waiting for the product with V any earlier.
      // seed: overflow
      if (softmax.overflows(sums)) {
        raised = true;
        raises = !softmax.scale_down(acc_s, sums, factors);
        if (raises) {
          recompute_scores<T, kHeadDim, kBlockN>(acc_s, sQ, shared.k(use + 1));
          score_mod.expect_larger(softmax);
        }
      }
    }
    if (__builtin_expect(raises, 0)) {
      // seed: recompute-scores
      score_mod.apply(acc_s, walk.position(n));
      hide_unseen(walk, n);
      raise(score_mod, sums, factors);
      if constexpr (score_mod.kMayOverflow) softmax.expect_overflow(factors);
    }
    return raised;
  }

  // P V of the last tile, and the results.
  __device__ __forceinline__ void end(const TileWalk& walk) {
    if (walk.sees_any()) {
      start_values();
      finish_values();
      ++use;
    }
#pragma unroll 1
    for (int n = walk.tiles.begin - 1; n >= walk.all.begin; --n) pass_over();
    // Where results go through Q's stage, that is not released yet, and its work tile is still in
    // shared memory: it is read again rather than kept in registers, which are scarce.
    const tile::SequenceTile work =
        kVarlen && !kFromRegisters ? *shared.work_tile(query_use) : walk.work;
    const tile::ResultRows<T> result(params, work);
    float scales[2];
    finish_rows(result, work, walk.first_row, softmax, scale, scales);
    if constexpr (kFromRegisters) {
      store_from_registers<T, kHeadDimV>(params, result, work, walk.first_row, scales, acc_o);
    } else {
      const bool stored =
          store_results<T, kHeadDimV, kVarlen>(params, launch, work, walk.first_row, consumer,
                                               shared.q(query_use, consumer), scales, acc_o);
      if (stored) shared.queries.release(query_use);
    }
  }
};

}  // namespace dlattn::sm90
