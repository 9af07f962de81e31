#pragma once

#include <type_traits>

#include "core/problem/descales.h"
#include "cuda/forward/sm90_fp8/epilogue.cuh"
#include "cuda/forward/sm90_fp8/products.cuh"
#include "cuda/forward/sm90_fp8/scales.cuh"
#include "cuda/forward/sm90_fp8/setup.cuh"
#include "cuda/tile/e4m3_softmax.cuh"
#include "cuda/tile/given_scores.cuh"
#include "cuda/tile/wgmma/key_walk.cuh"
#include "cuda/tile/wgmma/softmax.cuh"
#include "cuda/tile/wgmma/work_tile.cuh"

namespace dlattn::sm90_fp8 {

// How large probabilities are that are rounded to e4m3, whose numbers go up to 448 and are normal
// from 2^-6 on. Where a lane's sum is within that, no probability is beyond it. Powers of two are
// rounded to themselves: so the key that outweighs the others of a row loses nothing.
struct ByteRange {
  static constexpr float kMaxSum = 448.0f;
  static constexpr int kFirstExponent = 8;
  static constexpr int kSumExponent = 7;
  static constexpr bool kToPower = true;
  // Rounding of a larger one in base 2 would make the largest probability another number than a
  // power of two, and far beyond 448 in the end. Where it is off by its most, 2^-11, that is less
  // than a part in 2000. Scores as large have lost whole powers of two in the 14 bits of wgmma.
  static constexpr float kMostScaled = 0x1p13f;
};

// At the first keys of a walk maxima come first, so that all rows have their true row max: where a
// row has seen few keys, each of them counts.
constexpr int kExactKeys = 1024;

// wgmma cuts off a part of what it adds up: of the product of a tile with a V that has a mean this
// much, on average, which grows as the square of the tile's keys. It is given back, but for the
// row's largest probability, of which nothing is lost: so a row of one key is exact.
constexpr float rounding_bias(int block_n) {
  const float part = static_cast<float>(block_n) / 128.0f;
  return (0x1p-12f + 0x1p-14f) * part * part;
}

// A factor of scores, at least the least one. Products of e4m3 are below 2^32, so scores are below
// 2^-32 with that, and probabilities 1; but what is hidden stays -inf, which times 0 it would not.
// No less, so that row maxima can be told in units of it (change_units()) without overflow, of
// logits up to 2^64. NaN compares with nothing, and becomes it.
__device__ __forceinline__ float at_least_scale(float scale) {
  constexpr float kLeast = 0x1p-64f;
  return scale > kLeast ? scale : kLeast;
}

// The softmax of scores with the caller's bias, which may be of any magnitude: natural scores, true
// row maxima. A lane's two rows of its warp's 16.
struct GivenSoftmax {
  tile::OnlineSoftmax rows[2];
  float row_sum[2] = {0.0f, 0.0f};  // this lane's part of rows'

  // Scores to probabilities, in place. `factors`: what the output must be multiplied with.
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&acc_s)[kScores], float (&factors)[2]) {
    auto& scores = reinterpret_cast<float (&)[kScores / 4][4]>(acc_s);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factors[h] = tile::probabilities(rows[h], scores, h, tile::kLog2e);
      row_sum[h] = rows[h].row_sum;
    }
  }

  __device__ __forceinline__ tile::RowResult finalize(int h, float, const float* sink,
                                                      float shift) const {
    tile::OnlineSoftmax row = rows[h];
    row.row_sum = tile::reduce_sum<4>(row.row_sum);
    return tile::finalize_bytes(row, tile::kLog2e, sink, shift);
  }
};

// A consumer warpgroup: it computes its 64 query rows of one work tile after the other. A step
// starts S = Q K^T of the next key tile, adds the last P V to O, starts P V of this tile, and
// computes the next tile's probabilities while that runs. Without kPipelined it adds P V of this
// tile before it starts S, a part of its columns at a time, which takes fewer registers. Products
// with V start from 0 and are added to O in fp32, because wgmma's own accumulators would lose what
// is below 2^-13 of them. kGiven: with the caller's bias or mask, whose loads need the registers of
// the pipeline; scores are natural then, and each tile's maxima come first.
template <bool kVarlen, int kHeadDim, bool kScaled, bool kGiven>
struct Consumer {
  using SharedParts = Shared<kHeadDim>;

  __device__ __forceinline__ Consumer(const AttentionParams& params, const LaunchShape& shape,
                                      const KernelArgsOf<kScaled>& args, const SharedParts& shared,
                                      int consumer)
      : params(params),
        shape(shape),
        args(args),
        shared(shared),
        consumer(consumer),
        scheduler{shape, args.num_work_tiles},
        first_lane(threadIdx.x % 32 == 0),
        fixed_mask(tile::wgmma::position_mask(params, shape, tile::fixed_lengths(params))) {}

  __device__ __forceinline__ void run() {
    for (; kVarlen || scheduler.index(query_use) < scheduler.count; ++query_use) {
      tile::SequenceTile work;
      if constexpr (kVarlen) {
        work = tile::wgmma::received_tile(shared, query_use);
        if (work.seqlen_q == 0) break;
      } else {
        work = tile::fixed_lengths(params, scheduler.tile(scheduler.index(query_use)));
      }
      const TileWalk walk(
          work, kVarlen ? tile::wgmma::position_mask(params, shape, work) : fixed_mask, consumer);
      begin(walk);
#pragma unroll 1
      // seed: key-loop
      for (int n = walk.tiles.end - (kGiven ? 1 : 2); n >= walk.tiles.begin; --n) step(walk, n);
      release(shared.queries, query_use);
      end(walk);
    }
  }

 private:
  static constexpr TileShape kShape = tile_shape(kHeadDim);
  static constexpr int kBlockN = kShape.block_n;
  static constexpr bool kPipelined = kShape.pipelined && !kGiven;
  static constexpr float kRoundingBias = rounding_bias(kBlockN);
  static constexpr int kExactTiles = (kExactKeys + kBlockN - 1) / kBlockN;
  using TileWalk = tile::wgmma::KeyWalk<block_m(kShape), kBlockN>;
  using Softmax = std::conditional_t<kGiven, GivenSoftmax, tile::wgmma::RangedSoftmax<ByteRange>>;

  const AttentionParams& params;
  const LaunchShape& shape;
  const KernelArgsOf<kScaled>& args;
  const SharedParts& shared;
  const int consumer;
  const WorkTiles scheduler;
  const bool first_lane;
  // With fixed lengths the same for all work tiles.
  const tile::Mask fixed_mask;
  unsigned use = 0;        // uses so far of the stages of K and V
  unsigned query_use = 0;  // and of Q's: one for each work tile

  // Makes products q.k of the head, or of the tile, scores to base 2; kGiven: natural ones.
  float scale;
  TileScales<kScaled, kGiven> tiles;
  float acc_o[kHeadDim / 2];
  float acc_pv[kHeadDim / 2];  // of one tile; 0 where there is none; with kPipelined alone
  float acc_s[kBlockN / 2];
  std::uint32_t rP[kBlockN / kDepth][4];
  Softmax softmax;

  template <typename Stages>
  __device__ __forceinline__ void release(const Stages& ring, unsigned use) const {
    if (first_lane) ring.release(use);
  }

  // Whether tiles have scales of their own.
  __device__ __forceinline__ bool is_quantized() const {
    return kScaled && (!kGiven || params.precision != Precision::kInputs);
  }

  __device__ __forceinline__ Descales descales(const tile::SequenceTile& work) const {
    const std::int64_t head_kv = shape.heads_per_kv_head.quotient(work.head);
    return descales_of<std::int64_t>(params, work.batch, work.head, head_kv);
  }

  // Takes part in the barriers of a key tile that only other consumers see.
  __device__ __forceinline__ void pass_over() {
    shared.keys.wait_full(use);
    release(shared.keys, use);
    shared.transposed.wait_full(use);
    release(shared.transposed, use);
    ++use;
  }

  // Up to the probabilities of the first key tile.
  __device__ __forceinline__ void begin(const TileWalk& walk) {
    scale = 1.0f;  // rows that see no tile have no scores, but results of any scale
    if (is_quantized()) {
      if constexpr (kScaled)
        tiles = {params, shape, args.scales, walk.work, walk.first_row, kBlockN};
    } else {
      // NaN compares with nothing: then these are the scores of any scale, and end() has NaN.
      const float factor = shape.scale_log2 * descales(walk.work).scores;
      if constexpr (kScaled)
        tiles.of_queries = factor;
      else
        scale = at_least_scale(factor);
    }
    if constexpr (!kVarlen) shared.queries.wait_full(query_use);
#pragma unroll 1
    for (int n = walk.all.end - 1; n >= walk.all.begin && n >= walk.tiles.end; --n) pass_over();
    softmax = Softmax();
    if (walk.sees_any()) {
      if constexpr (kGiven)
        tiles.set(tiles.load(walk.tiles.end - 1, walk.tiles.end - 1));
      else
        begin_first(walk);
    }
    // Cleared last, so that these registers are free until here.
#pragma unroll
    for (int d = 0; d < kHeadDim / 2; ++d) acc_o[d] = acc_pv[d] = 0.0f;
  }

  __device__ __forceinline__ void begin_first(const TileWalk& walk) {
    const int n = walk.tiles.end - 1;
    if constexpr (kScaled) {
      tiles.set(tiles.load(n, n));
      scale = scale_of_tile();
    }
    const LoadedScales loaded = tiles.load(n - 1, n);
    shared.keys.wait_full(use);
    start_qk<kHeadDim, kBlockN>(acc_s, shared.q(query_use, consumer), shared.k(use));
    ptx::wgmma_wait<0>();
    release(shared.keys, use);
    hide_unseen(walk, n);
    float sums[2], probabilities[kBlockN / 2];
    softmax.begin(acc_s, scale, probabilities, sums);
    pack_probabilities(rP, probabilities);
    tiles.set(loaded);
  }

  // That of the quantised tile that is walked next.
  __device__ __forceinline__ float scale_of_tile() const {
    return at_least_scale(tiles.of_scores()) * (kGiven ? tile::kLn2 : 1.0f);
  }

  // Natural scores with the caller's bias, of which the hidden ones are -inf.
  __device__ __forceinline__ void apply_given(const TileWalk& walk, int n) {
    const ThreadIndex thread;
    const int row = walk.first_row + thread.warp * 16, n0 = n * kBlockN;
    const tile::GivenScores given(params, walk.work, row, walk.work.seqlen_q);
    tile::Mask mask = walk.mask;  // of the warp's rows and the tile's keys
    mask.shift += row - n0;
    mask.seqlen_k -= n0;
    auto& scores = reinterpret_cast<float (&)[1][kBlockN / 8][4]>(acc_s);
#pragma unroll
    for (float& score : acc_s) score *= scale;
    if (given.has_bias()) given.add_bias(scores, mask, n0, thread.lane);
    if (given.has_mask()) {
      given.hide(scores, mask, n0, thread.lane);
    } else {
      hide_unseen(walk, n);
    }
  }

  __device__ __forceinline__ void hide_unseen(const TileWalk& walk, int n) {
    if (walk.is_edge(n)) tile::wgmma::apply_mask(acc_s, walk.mask, walk.first_row, n * kBlockN);
  }

  // O += P V of the tile whose product is in acc_pv.
  __device__ __forceinline__ void promote() {
#pragma unroll
    for (int d = 0; d < kHeadDim / 2; ++d) acc_o[d] = tiles.add(acc_o[d], acc_pv[d]);
  }

  // Starts P V of the tile whose probabilities are in rP.
  __device__ __forceinline__ void start_values() {
    shared.transposed.wait_full(use);
    start_pv<kHeadDim, kBlockN>(acc_pv, rP, shared.v_transposed(use));
  }
  __device__ __forceinline__ void finish_values() {
    ptx::wgmma_wait<0>();
    release(shared.transposed, use);
  }
  // O += P V of that tile, from start to end.
  __device__ __forceinline__ void add_values() {
    if constexpr (kPipelined) {
      start_values();
      finish_values();
      promote();
    } else {
      shared.transposed.wait_full(use);
      add_pv<kHeadDim, kBlockN>(acc_o, rP, shared.v_transposed(use),
                                [this](float o, float product) { return tiles.add(o, product); });
      release(shared.transposed, use);
    }
  }

  // The whole of tile n, one thing after the other: code that is long is there once, for the first
  // tile too.
  __device__ __forceinline__ void step_given(const TileWalk& walk, int n) {
    const LoadedScales loaded = tiles.load(n - 1, n);
    shared.keys.wait_full(use);
    start_qk<kHeadDim, kBlockN>(acc_s, shared.q(query_use, consumer), shared.k(use));
    if constexpr (kScaled) scale = scale_of_tile();
    ptx::wgmma_wait<0>();
    release(shared.keys, use);
    apply_given(walk, n);
    float factors[2];
    softmax.exponentiate(acc_s, factors);
    if (__any_sync(tile::kFullMask, factors[0] != 1.0f || factors[1] != 1.0f))
      tile::wgmma::rescale(acc_o, factors);
    pack_probabilities(rP, acc_s);
    tiles.set(loaded);
    add_values();
    ++use;
  }

  __device__ __forceinline__ void step(const TileWalk& walk, int n) {
    if constexpr (kGiven) {
      step_given(walk, n);
    } else {
      step_ahead(walk, n);
    }
  }

  // S and probabilities of tile n, whose K has use + 1, and P V of the tile walked before it.
  __device__ __forceinline__ void step_ahead(const TileWalk& walk, int n) {
    if constexpr (!kPipelined) add_values();
    const ptx::SmemAddress sQ = shared.q(query_use, consumer);
    float next = 0.0f;
    if constexpr (kScaled) next = scale_of_tile();
    const LoadedScales loaded = tiles.load(n - 1, kPipelined ? n + 1 : n);
    shared.keys.wait_full(use + 1);
    start_qk<kHeadDim, kBlockN>(acc_s, sQ, shared.k(use + 1));
    if constexpr (kPipelined) {
      // seed: promote
      promote();  // under that product
      start_values();
    }
    if constexpr (kScaled) {
      // seed: change-units
      if (softmax.unscaled()) softmax.change_units(scale / next);
      scale = next;
    }
    ptx::wgmma_wait<kPipelined ? 1 : 0>();
    float factors[2], sums[2];
    const bool raised = exponentiate(n, sQ, walk, sums, factors);
    release(shared.keys, use + 1);
    softmax.add(sums);
    if constexpr (kPipelined) {
      // seed: finish-values
      finish_values();
    }
    // seed: rescale-output
    if (raised) {
      tile::wgmma::rescale(acc_o, factors);
      if constexpr (kPipelined) tile::wgmma::rescale(acc_pv, factors);
    }
    pack_probabilities(rP, acc_s);  // only now: products in flight may still read rP
    tiles.set(loaded);
    ++use;
  }

  // Turns tile n's scores into probabilities and their sums. Returns whether row maxima rose; then
  // `factors` is what the output must be multiplied with.
  __device__ __forceinline__ bool exponentiate(int n, ptx::SmemAddress sQ, const TileWalk& walk,
                                               float (&sums)[2], float (&factors)[2]) {
    // Else the sums tell whether the row maxima fit.
    bool raises = softmax.raises_first() || n >= walk.tiles.end - kExactTiles;
    bool raised = false;
    if (__builtin_expect(!raises, 1)) {
      hide_unseen(walk, n);
      softmax.exponentiate(acc_s, scale, sums);
      // This branch also keeps the compiler from waiting for the product with V any earlier.
      // seed: overflow
      if (softmax.overflows(sums)) {
        raised = true;
        raises = !softmax.scale_down(acc_s, sums, factors);
        if (raises) recompute_scores<kHeadDim, kBlockN>(acc_s, sQ, shared.k(use + 1));
      }
    }
    if (__builtin_expect(raises, 0)) {
      // seed: recompute-scores
      hide_unseen(walk, n);
      softmax.raise(acc_s, scale, factors);
      softmax.exponentiate_raised(acc_s, scale, sums);
      softmax.expect_overflow(factors);
      raised = __any_sync(tile::kFullMask, factors[0] != 1.0f || factors[1] != 1.0f);
    }
    return raised;
  }

  // P V of the last tile, and the results.
  __device__ __forceinline__ void end(const TileWalk& walk) {
    if (!kGiven && walk.sees_any()) {
      if constexpr (kPipelined) promote();
      tiles.set(tiles.load(0, walk.tiles.begin));
      add_values();
      ++use;
    }
#pragma unroll 1
    for (int n = walk.tiles.begin - 1; n >= walk.all.begin; --n) pass_over();
    const Descales factors = is_quantized() ? Descales{1.0f, 1.0f} : descales(walk.work);
    const tile::ResultRows<float> result(params, walk.work);
    const ThreadIndex thread;
    float scales[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = walk.first_row + thread.warp * 16 + 8 * h + thread.lane / 4;
      const float row_sum = tile::reduce_sum<4>(softmax.row_sum[h]);
      // The mean that was subtracted from k, which is in the logits of all the row's keys.
      float shift = 0.0f;
      if constexpr (kScaled) {
        if (is_quantized() && (result.lse || result.sink) && walk.sees_any())
          shift = shift_of_row(params, shape, args.scales, walk.work, i);
        if (row_sum == 0.0f) shift = 0.0f;
      }
      const tile::RowResult row = softmax.finalize(h, scale, result.sink, shift);
      // 0 where there is nothing to sum, whatever the descales are; else NaN if that of scores is.
      const bool any = row.scale != 0.0f;
      const float of_scores = factors.scores >= 0.0f ? 1.0f : factors.scores;
      const float largest = static_cast<float>(1 << ByteRange::kFirstExponent);
      const float others = fmaxf(1.0f - largest / row_sum, 0.0f);
      const float given_back = fmaf(others, kRoundingBias, 1.0f);
      scales[h] = any ? row.scale * given_back * factors.v * of_scores : 0.0f;
      if (result.lse && thread.lane % 4 == 0 && i < walk.work.seqlen_q)
        result.lse[i] = (row.lse + shift) * (any ? of_scores : 1.0f);
    }
    store_results<kHeadDim>(params, shape, walk.work, walk.first_row, scales, acc_o);
  }
};

}  // namespace dlattn::sm90_fp8
