#pragma once

#include "cuda/backward/sm90/setup.cuh"
#include "cuda/tile/box_source.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::backward_sm90 {

// Brings Q and dO of tile m, and lse and delta of its queries, in the form that the consumers need.
template <int kHeadDim, bool kSoftcap, typename Rows>
__device__ __forceinline__ void produce_queries(const Problem& p, const TensorMaps& maps,
                                                const Shared<kHeadDim, kSoftcap>& shared,
                                                const Rows& rows, unsigned use, int m,
                                                std::int64_t first_row) {
  constexpr int kBlockM = shared.kBlockM, kPairs = kBlockM / 64;
  const int lane = static_cast<int>(threadIdx.x) % 32, m0 = m * kBlockM;
  // Loaded before the stage is free. Rows that there are not have probabilities of 0.
  RowStatsPair pairs[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const std::int64_t row = first_row + m0 + 2 * (lane + 32 * i);
    tile::load(pairs[i].lse, p.lse_log2 + row);
    tile::load(pairs[i].delta, p.delta + row);
  }
  shared.queries.wait_empty(use);
  const ptx::SmemAddress full = shared.queries.full_barrier(use);
  if (lane == 0) {
    ptx::mbarrier_arrive_expect_tx(full, 2 * shared.kQueryBytes);
#pragma unroll
    for (int d = 0; d < kHeadDim; d += kBlockColumns) {
      rows.load(shared.q(use) + tile_bytes(kBlockM, d), maps.q, full, d, m0);
      rows.load(shared.dout(use) + tile_bytes(kBlockM, d), maps.dout, full, d, m0);
    }
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) shared.row_stats(use)[lane + 32 * i] = pairs[i];
  shared.queries.end_fill(use);
}

// The producer's warp: one lane starts all copies of the block, and all of them bring lse and
// delta.
template <bool kVarlen, bool kPasses, int kHeadDim, bool kSoftcap>
__device__ __forceinline__ void produce(const Problem& p, const TensorMaps& maps,
                                        const Shared<kHeadDim, kSoftcap>& shared) {
  constexpr int kBlockN = shared.kBlockN;
  const auto& work = shared.work();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (work.tiles.begin >= work.tiles.end) return;
  unsigned use = 0;
#pragma unroll 1
  for (int pass = 0; pass < (kPasses ? p.passes : 1); ++pass) {
    if (kPasses && pass > 0) ptx::mbarrier_sleep(shared.keys_empty, (pass - 1) % 2);
    const int batch = work.batch + pass;
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(shared.keys_full, 2 * shared.kKeyBytes);
      const auto keys = tile::box_source<kVarlen>(work.head_kv, batch, work.start_k, work.seqlen_k);
#pragma unroll
      for (int d = 0; d < kHeadDim; d += kBlockColumns) {
        keys.load(shared.k() + tile_bytes(kBlockN, d), maps.k, shared.keys_full, d, work.n0);
        keys.load(shared.v() + tile_bytes(kBlockN, d), maps.v, shared.keys_full, d, work.n0);
      }
    }
    std::int64_t first_row = work.first_row + pass * p.heads_per_entry * p.padded_rows;
    int head = work.head_kv * p.heads_per_kv_head;
    for (int left = p.heads_per_kv_head; left > 0; --left, ++head, first_row += p.padded_rows) {
      const auto rows = tile::box_source<kVarlen>(head, batch, work.start_q, work.seqlen_q);
      for (int m = work.tiles.begin; m < work.tiles.end; ++m, ++use)
        produce_queries(p, maps, shared, rows, use, m, first_row);
    }
  }
}

}  // namespace dlattn::backward_sm90
