#pragma once

#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/items.cuh"
#include "cuda/sm90/products.cuh"
#include "cuda/sm90/score.cuh"
#include "cuda/sm90/setup.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/sm90/tiles.cuh"

namespace dlattn::sm90 {

// The item that comes with Q, the same in all lanes, and by this the compiler knows.
template <typename Shared>
__device__ __forceinline__ Item received_item(const Shared& shared, unsigned query_use) {
  shared.queries.wait_full(query_use);
  const auto uniform = [](int x) { return __shfl_sync(tile::kFullMask, x, 0); };
  const Item item = *shared.item(query_use);
  __syncwarp();  // one lane will release it for all
  return {uniform(item.m_block), item.head, item.batch, item.start_q, uniform(item.seqlen_q),
          uniform(item.seqlen_k)};
}

// A consumer warpgroup's 64 query rows of one work item after the other. A step starts the scores
// of the next tile ahead of this tile's product with V, and works out the probabilities of the
// former while the latter runs.
template <typename T, bool kVarlen, int kHeadDim, int kHeadDimV, Terms kTerms>
__device__ __forceinline__ void consume(const AttentionParams& params, const LaunchShape& shape,
                                        const Launch& launch,
                                        const Shared<kHeadDim, kHeadDimV, kTerms>& shared,
                                        int consumer) {
  constexpr TileShape kShape = tile_shape(kHeadDim, kHeadDimV, kTerms);
  constexpr int kBlockN = kShape.block_n;
  constexpr int kBlockM = block_m(kShape);
  constexpr bool kFromRegisters = stores_from_registers(kHeadDim, kTerms);
  const bool first_lane = threadIdx.x % 32 == 0;
  // Of one length for all, so not worked out for every item, where it takes a register more.
  const tile::Mask fixed_mask = position_mask(params, shape, fixed_lengths(params));
  const float scale = score_scale<kTerms>(params, shape);
  TermTiles<kTerms> loaded(launch.score, shared, consumer);
  const Turns<kShape.num_consumers, kShape.takes_turns> turns{consumer};
  unsigned use = 0;        // of the stages of K and V
  unsigned query_use = 0;  // of those of Q

  turns.begin();
  for (unsigned i = blockIdx.x; kVarlen || i < launch.num_items; i += gridDim.x, ++query_use) {
    Item item;
    if constexpr (kVarlen) {
      item = received_item(shared, query_use);
      if (item.seqlen_q == 0) break;
    } else {
      item = fixed_item(params, shape, i);
    }
    const tile::Mask mask = kVarlen ? position_mask(params, shape, item) : fixed_mask;
    const int m0 = item.m_block * kBlockM;
    const int first_row = m0 + consumer * kWarpgroupRows;
    const int last_row = min(first_row + kWarpgroupRows, item.seqlen_q) - 1;
    const TileRange all(mask, m0, min(m0 + kBlockM, item.seqlen_q) - 1, kBlockN);
    const TileRange tiles(mask, first_row, last_row, kBlockN);
    const WholeTiles whole(mask, first_row, kBlockN);
    const ptx::SmemAddress sQ = shared.q(query_use, consumer);
    LaneTerms<T, kTerms> terms(params, shape, launch.score, {item.m_block, item.head, item.batch},
                               loaded);

    float acc_o[kHeadDimV / 2];
    float acc_s[kBlockN / 2];
    std::uint32_t rP[kBlockN / 16][4];
    Softmax softmax;
    bool leaping = false;  // scores, from tile to tile, beyond what fp32 makes of them
#pragma unroll
    for (int d = 0; d < kHeadDimV / 2; ++d) acc_o[d] = 0.0f;

    const auto release = [&](const auto& ring, unsigned use) {
      if (first_lane) ring.release(use);
    };
    // A tile that other consumers see.
    const auto pass_over = [&] {
      turns.wait();
      turns.pass();
      shared.keys.wait_full(use);
      release(shared.keys, use);
      shared.values.wait_full(use);
      release(shared.values, use);
      ++use;
    };
    // Of tile n; the one before it in the walk, n + 1, is use `use`.
    const auto step = [&](int n) {
      shared.keys.wait_full(use + 1);
      turns.wait();
      start_qk<T, kHeadDim, kBlockN>(acc_s, sQ, shared.k(use + 1));
      shared.values.wait_full(use);
      start_pv<T, kHeadDimV, kBlockN>(acc_o, rP, shared.v(use));
      turns.pass();
      ptx::wgmma_wait<1>();
      loaded.wait_full();
      terms.apply_quickly(acc_s, first_row + mask.shift - n * kBlockN,
                          n < whole.begin || n >= whole.end);
      if (n < whole.begin || n >= whole.end) apply_mask(acc_s, mask, first_row, n * kBlockN);
      float sums[2], factors[2];
      bool raised = false;
      while (true) {
        const bool maximum_first = leaping;
        if (maximum_first) {
          softmax.raise(acc_s, scale, factors);
          leaping = terms.kMayLeap && Softmax::leapt(factors);
          raised = true;
        }
        terms.exponentiate(acc_s, softmax, scale, sums);
        // This branch also keeps the compiler from waiting for the product with V any earlier.
        if (maximum_first || !softmax.outgrown<T>(sums)) break;
        raised = true;
        if (softmax.scale_down(acc_s, sums, factors)) break;
        recompute_scores<T, kHeadDim, kBlockN>(acc_s, sQ, shared.k(use + 1));
        terms.expect_larger();
        terms.apply(acc_s, first_row + mask.shift - n * kBlockN);
        apply_mask(acc_s, mask, first_row, n * kBlockN);
        leaping = true;
      }
      release(shared.keys, use + 1);
      loaded.release();
      softmax.add(sums);
      ptx::wgmma_wait<0>();
      release(shared.values, use);
      if (raised) rescale(acc_o, factors);
      pack_probabilities<T>(rP, acc_s);  // only now: products in flight may still read rP
      ++use;
    };

    if constexpr (!kVarlen) shared.queries.wait_full(query_use);
    int n = all.end - 1;
#pragma unroll 1
    for (; n >= all.begin && n >= tiles.end; --n) pass_over();
    if (tiles.begin < tiles.end) {
      // The first tile: its scores and probabilities alone.
      shared.keys.wait_full(use);
      turns.wait();
      start_qk<T, kHeadDim, kBlockN>(acc_s, sQ, shared.k(use));
      turns.pass();
      ptx::wgmma_wait<0>();
      release(shared.keys, use);
      loaded.wait_full();
      terms.apply(acc_s, first_row + mask.shift - n * kBlockN);
      loaded.release();
      apply_mask(acc_s, mask, first_row, n * kBlockN);
      float sums[2], factors[2];
      softmax.raise(acc_s, scale, factors);
      softmax.exponentiate(acc_s, scale, sums);
      softmax.add(sums);
      pack_probabilities<T>(rP, acc_s);
      --n;
#pragma unroll 1
      for (; n >= tiles.begin; --n) step(n);
      if (kFromRegisters) release(shared.queries, query_use);
      // The last tile's product with V.
      shared.values.wait_full(use);
      start_pv<T, kHeadDimV, kBlockN>(acc_o, rP, shared.v(use));
      ptx::wgmma_wait<0>();
      release(shared.values, use);
      ++use;
    } else if (kFromRegisters) {
      release(shared.queries, query_use);
    }
#pragma unroll 1
    for (; n >= all.begin; --n) pass_over();

    if constexpr (kFromRegisters) {
      store_from_registers<T, kHeadDimV>(params, item, first_row, softmax, acc_o);
    } else {
      // Read again: with score terms registers are scarce on the way here.
      if constexpr (kVarlen && kTerms != Terms::kNone) item = *shared.item(query_use);
      const bool stored = store_results<T, kHeadDimV, kVarlen>(params, launch, item, first_row,
                                                               consumer, sQ, softmax, acc_o);
      if (stored) shared.queries.release(query_use);
    }
  }
  turns.end();
}

}  // namespace dlattn::sm90
