#pragma once

#include "cuda/backward/sm90/pair_setup.cuh"
#include "cuda/tile/box_source.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::backward_sm90 {

// The producer's warp of either block of a pair. Each block brings half of dO's columns to both,
// and Q for itself alone: they do not need a tile of it at one time.
template <int kHeadDim, int kRank>
struct PairProducer {
  const Problem& p;
  const TensorMaps& maps;
  const PairShared<kHeadDim, kRank>& shared;

  template <bool kVarlen>
  __device__ __forceinline__ void run() const {
    const PairWork& work = shared.work();
    if (work.tiles.begin >= work.tiles.end) return;
    if (lane() == 0) bring_keys<kVarlen>();
    unsigned use = 0;
    std::int64_t first_row = work.first_row;
    int head = work.head_kv * p.heads_per_kv_head;
#pragma unroll 1
    for (int left = p.heads_per_kv_head; left > 0; --left, ++head, first_row += p.padded_rows) {
      const auto rows = tile::box_source<kVarlen>(head, work.batch, work.start_q, work.seqlen_q);
#pragma unroll 1
      for (int m = work.tiles.begin; m < work.tiles.end; ++m, ++use)
        bring_queries(rows, use, m * kPairQueries, first_row);
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  template <bool kVarlen>
  __device__ __forceinline__ void bring_keys() const {
    const PairWork& work = shared.work();
    const auto keys =
        tile::box_source<kVarlen>(work.head_kv, work.batch, work.start_k, work.seqlen_k);
    constexpr int kBytes = shared.kKeyBytes;
    ptx::mbarrier_arrive_expect_tx(shared.keys_full,
                                   kRank == 0 ? kBytes : kBytes + kBytes / kPairBlocks);
#pragma unroll
    for (int d = 0; d < kHeadDim; d += kBlockColumns)
      keys.load(shared.keys() + tile_bytes(kPairKeys, d), kRank == 0 ? maps.k : maps.v,
                shared.keys_full, d, work.n0);
    if constexpr (kRank == 1) {
#pragma unroll
      for (int d = 0; d < kHeadDim / 2; d += kBlockColumns)
        keys.load(shared.base + shared.kMap.half_keys + tile_bytes(kPairKeys, d), maps.k,
                  shared.keys_full, kHeadDim / 2 + d, work.n0);
    }
  }

  template <typename Rows>
  __device__ __forceinline__ void bring_queries(const Rows& rows, unsigned use, int m0,
                                                std::int64_t first_row) const {
    // Loaded before the stage is free. Rows that there are not have probabilities of 0.
    RowStatsPair pair;
    tile::load(pair.lse, p.lse_log2 + (first_row + m0 + 2 * lane()));
    tile::load(pair.delta, p.delta + (first_row + m0 + 2 * lane()));
    if constexpr (kRank == 0) bring_q(rows, use, m0, &pair);
    bring_dout(rows, use, m0, &pair);
    if constexpr (kRank == 1) bring_q(rows, use, m0, &pair);
  }

  template <typename Rows>
  __device__ __forceinline__ void bring_q(const Rows& rows, unsigned use, int m0,
                                          const RowStatsPair* stats) const {
    shared.q.wait_empty(use);
    if (lane() == 0) {
      const ptx::SmemAddress full = shared.q.full_barrier(use);
      ptx::mbarrier_arrive_expect_tx(full, shared.kQueryBytes);
#pragma unroll
      for (int d = 0; d < kHeadDim; d += kBlockColumns)
        rows.load(shared.q_tile(use) + tile_bytes(kPairQueries, d), maps.q, full, d, m0);
    }
    if constexpr (kRank == 0) store_stats(use, *stats, shared.q);
  }

  template <typename Rows>
  __device__ __forceinline__ void bring_dout(const Rows& rows, unsigned use, int m0,
                                             const RowStatsPair* stats) const {
    shared.dout.wait_empty(use);
    if (lane() == 0) {
      const ptx::SmemAddress full = shared.dout.full_barrier(use);
      ptx::mbarrier_arrive_expect_tx(full, shared.kQueryBytes);
#pragma unroll
      for (int d = kRank * kHeadDim / 2; d < (kRank + 1) * kHeadDim / 2; d += kBlockColumns)
        rows.load_to_pair(shared.dout_tile(use) + tile_bytes(kPairQueries, d), maps.dout, full, d,
                          m0);
    }
    if constexpr (kRank == 1) store_stats(use, *stats, shared.dout);
  }

  template <typename Ring>
  __device__ __forceinline__ void store_stats(unsigned use, const RowStatsPair& stats,
                                              const Ring& ring) const {
    shared.row_stats(use)[lane()] = stats;
    ring.end_fill(use);
  }
};

// By one thread of the second block: sends each tile of dS to the first one, which has done with
// the one in that place when it has sent this one's P.
template <int kHeadDim>
__device__ __forceinline__ void send_score_gradients(const Problem& p,
                                                     const PairShared<kHeadDim, 1>& shared) {
  const unsigned tiles = shared.work().num_tiles(p);
#pragma unroll 1
  for (unsigned use = 0; use < tiles; ++use) {
    shared.scores.wait_full(use);
    ptx::copy_to_block(shared.score_tile(use), shared.score_tile(use), shared.kScoreBytes,
                       shared.copy_full(use), 0);
  }
}

}  // namespace dlattn::backward_sm90
