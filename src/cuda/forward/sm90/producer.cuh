#pragma once

#include "cuda/forward/sm90/setup.cuh"
#include "cuda/tile/box_source.cuh"
#include "cuda/tile/head_groups.cuh"
#include "cuda/tile/wgmma/mask.cuh"
#include "cuda/tile/wgmma/work_tile.cuh"

namespace dlattn::sm90 {

// One thread starts all copies of the block, as stages become free. The next tile of K comes before
// the V of this one, as the consumers want them: K[n], K[n - 1], V[n], K[n - 2], V[n - 1], ...
template <bool kVarlen, int kHeadDim, int kHeadDimV, Variant kVariant>
__device__ __forceinline__ void produce(const AttentionParams& params, const LaunchShape& shape,
                                        const KernelArgs& args,
                                        const Shared<kHeadDim, kHeadDimV, kVariant>& shared) {
  constexpr TileShape kShape = tile_shape(kHeadDim, kHeadDimV, kVariant);
  constexpr int kBlockN = kShape.block_n;
  constexpr int kBlockM = block_m(kShape);
  ptx::prefetch_tensor_map(args.q);
  ptx::prefetch_tensor_map(args.k);
  ptx::prefetch_tensor_map(args.v);
  ptx::prefetch_tensor_map(args.out);
  const int head_dim_v = static_cast<int>(params.head_dim_v);
  const int value_bytes = tile_bytes(kBlockN, head_dim_v);  // further columns are never stored
  const tile::RoundRobin scheduler{shape, args.num_work_tiles};
  unsigned use = 0;        // of the stages of K and V
  unsigned query_use = 0;  // of those of Q
  for (unsigned round = 0;; ++round) {
    const unsigned index = scheduler.index(round);
    if (index >= scheduler.count) break;
    int start_k = 0;
    tile::SequenceTile work;
    if (kVarlen && (!serves_all_lengths(kVariant) || params.cu_seqlens_q)) {
      work = tile::varlen_tile(params, shape, kBlockM, index, &start_k);
      if (work.seqlen_q == 0) continue;
    } else {
      work = tile::fixed_lengths(params, tile::scheduled_tile(shape, args.heads, index));
    }
    if constexpr (kVarlen) tile::wgmma::hand_over(shared, query_use, work);
    const int head_kv = static_cast<int>(shape.heads_per_kv_head.quotient(work.head));
    const int m0 = work.m_block * kBlockM;
    const tile::Range tiles =
        tile::wgmma::visible_tiles(tile::wgmma::position_mask(params, shape, work), m0,
                                   min(m0 + kBlockM, work.seqlen_q) - 1, kBlockN);

    const ptx::SmemAddress arrived = shared.queries.begin_fill(query_use, shared.kQueryBytes);
    const auto with_boxes = [&](int head, int start, int length, const auto& use) {
      if constexpr (serves_all_lengths(kVariant)) {
        tile::with_boxes(params.cu_seqlens_q != nullptr, head, work.batch, start, length, use);
      } else {
        use(tile::box_source<kVarlen>(head, work.batch, start, length));
      }
    };
    with_boxes(work.head, work.start_q, work.seqlen_q, [&](const auto& queries) {
#pragma unroll
      for (int c = 0; c < row_groups(kShape); ++c) {
#pragma unroll
        for (int d = 0; d < kHeadDim; d += kBlockColumns) {
          queries.load(shared.q(query_use, c) + tile_bytes(kWarpgroupRows, d), args.q, arrived, d,
                       m0 + c * kWarpgroupRows);
        }
      }
    });
    ++query_use;

    // Each block of a pair copies every other block of columns, to both.
    const auto load_block = [&](const auto& keys, const ptx::TensorMap& map, ptx::SmemAddress to,
                                ptx::SmemAddress full, int n, int d) {
      if constexpr (cluster_blocks(kVariant) == 1) {
        keys.load(to, map, full, d, n * kBlockN);
      } else if (d / kBlockColumns % 2 == static_cast<int>(blockIdx.x % 2)) {
        keys.load_to_pair(to, map, full, d, n * kBlockN);
      }
    };
    const auto load = [&](const ptx::TensorMap& map, ptx::SmemAddress to, ptx::SmemAddress full,
                          int n, int columns) {
      with_boxes(head_kv, start_k, work.seqlen_k, [&](const auto& keys) {
#pragma unroll
        for (int d = 0; d < kHeadDim; d += kBlockColumns) {
          if (d < columns) load_block(keys, map, to + tile_bytes(kBlockN, d), full, n, d);
        }
      });
    };
    const auto load_k = [&](int n, unsigned use) {
      load(args.k, shared.k(use), shared.keys.begin_fill(use, shared.kKeyBytes), n, kHeadDim);
    };
    const auto load_v = [&](int n, unsigned use) {
      load(args.v, shared.v(use), shared.values.begin_fill(use, value_bytes), n, head_dim_v);
    };
    if (tiles.begin < tiles.end) load_k(tiles.end - 1, use);
    for (int n = tiles.end - 1; n >= tiles.begin; --n, ++use) {
      if (n > tiles.begin) load_k(n - 1, use + 1);
      load_v(n, use);
    }
  }
  if constexpr (kVarlen) {
    tile::wgmma::hand_over(shared, query_use, tile::SequenceTile{});  // that was all
    shared.queries.begin_fill(query_use, 0);
  }
}

}  // namespace dlattn::sm90
