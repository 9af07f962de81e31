#pragma once

#include "cuda/backward/sm90/setup.cuh"
#include "cuda/tile/box_source.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::backward_sm90 {

// The producer's warp: one lane starts all copies of the block, and all of them bring lse and delta
// of a step's queries, in the form that the consumers need.
template <bool kVarlen, int kHeadDim, bool kSoftcap>
__device__ __forceinline__ void produce(const Problem& p, const TensorMaps& maps,
                                        const Shared<kHeadDim, kSoftcap>& shared) {
  constexpr int kBlockM = shared.kBlockM, kBlockN = shared.kBlockN, kPairs = kBlockM / 64;
  const auto& work = shared.work();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (work.tiles.begin >= work.tiles.end) return;
  if (lane == 0) {
    ptx::mbarrier_arrive_expect_tx(shared.keys_full, 2 * shared.kKeyBytes);
    const auto keys =
        tile::box_source<kVarlen>(work.head_kv, work.batch, work.start_k, work.seqlen_k);
#pragma unroll
    for (int d = 0; d < kHeadDim; d += kBlockColumns) {
      keys.load(shared.k() + tile_bytes(kBlockN, d), maps.k, shared.keys_full, d, work.n0);
      keys.load(shared.v() + tile_bytes(kBlockN, d), maps.v, shared.keys_full, d, work.n0);
    }
  }
  unsigned use = 0;
  for (int h = 0; h < p.heads_per_kv_head; ++h) {
    const int head = work.head_kv * p.heads_per_kv_head + h;
    const std::int64_t first_row = work.first_row + h * p.padded_rows;
    const auto rows = tile::box_source<kVarlen>(head, work.batch, work.start_q, work.seqlen_q);
    for (int m = work.tiles.begin; m < work.tiles.end; ++m, ++use) {
      const int m0 = m * kBlockM;
      // Loaded before the stage is free. Rows that there are not have probabilities of 0.
      RowStatsPair pairs[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const std::int64_t row = first_row + m0 + 2 * (lane + 32 * i);
        tile::load(pairs[i].lse, p.lse_log2 + row);
        tile::load(pairs[i].delta, p.delta + row);
      }
      shared.queries.wait_empty(use);
      const ptx::SmemAddress full =
          shared.queries.full + shared.queries.stage(use) * ptx::kMbarrierBytes;
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
  }
}

}  // namespace dlattn::backward_sm90
