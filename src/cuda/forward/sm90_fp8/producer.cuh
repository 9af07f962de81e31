#pragma once

#include "cuda/forward/sm90_fp8/setup.cuh"
#include "cuda/tile/box_source.cuh"
#include "cuda/tile/wgmma/work_tile.cuh"

namespace dlattn::sm90_fp8 {

// One thread starts all copies of the block, as stages become free. The next tile of K comes before
// the V of this one, as the consumers want them: K[n], K[n - 1], V[n], K[n - 2], V[n - 1], ...
template <bool kVarlen, int kHeadDim>
__device__ __forceinline__ void produce(const AttentionParams& params, const LaunchShape& shape,
                                        const KernelArgs& args, const Shared<kHeadDim>& shared) {
  constexpr TileShape kShape = tile_shape(kHeadDim);
  constexpr int kBlockN = kShape.block_n;
  constexpr int kBlockM = block_m(kShape);
  ptx::prefetch_tensor_map(args.q);
  ptx::prefetch_tensor_map(args.k);
  ptx::prefetch_tensor_map(args.v);
  unsigned use = 0;        // of the stages of K and V
  unsigned query_use = 0;  // of those of Q
  const auto copy = [&](const tile::SequenceTile& work, int start_k, const tile::Range& tiles) {
    if constexpr (kVarlen) tile::wgmma::hand_over(shared, query_use, work);
    const ptx::SmemAddress arrived = shared.queries.begin_fill(query_use, shared.kQueryBytes);
    const auto queries =
        tile::box_source<kVarlen>(work.head, work.batch, work.start_q, work.seqlen_q);
#pragma unroll
    for (int c = 0; c < kShape.num_consumers; ++c) {
#pragma unroll
      for (int d = 0; d < kHeadDim; d += kBlockColumns) {
        queries.load(shared.q(query_use, c) + tile_bytes(kWarpgroupRows, d), args.q, arrived, d,
                     work.m_block * kBlockM + c * kWarpgroupRows);
      }
    }
    ++query_use;

    const int head_kv = static_cast<int>(shape.heads_per_kv_head.quotient(work.head));
    const auto keys = tile::box_source<kVarlen>(head_kv, work.batch, start_k, work.seqlen_k);
    const auto load = [&](const ptx::TensorMap& map, ptx::SmemAddress to, ptx::SmemAddress full,
                          int n) {
#pragma unroll
      for (int d = 0; d < kHeadDim; d += kBlockColumns)
        keys.load(to + tile_bytes(kBlockN, d), map, full, d, n * kBlockN);
    };
    const auto load_k = [&](int n, unsigned use) {
      load(args.k, shared.k(use), shared.keys.begin_fill(use, shared.kKeyBytes), n);
    };
    if (tiles.begin < tiles.end) load_k(tiles.end - 1, use);
#pragma unroll 1
    for (int n = tiles.end - 1; n >= tiles.begin; --n, ++use) {
      if (n > tiles.begin) load_k(n - 1, use + 1);
      load(args.v, shared.v(use), shared.values.begin_fill(use, shared.kKeyBytes), n);
    }
  };
  for_each_work_tile<kVarlen, kBlockM, kBlockN>(params, shape, args, copy);
  if constexpr (kVarlen) {
    tile::wgmma::hand_over(shared, query_use, tile::SequenceTile{});  // that was all
    shared.queries.begin_fill(query_use, 0);
  }
}

}  // namespace dlattn::sm90_fp8
