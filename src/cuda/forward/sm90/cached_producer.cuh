#pragma once

#include "cuda/forward/sm90/setup.cuh"
#include "cuda/tile/box_source.cuh"
#include "cuda/tile/cache_source.cuh"
#include "cuda/tile/wgmma/mask.cuh"
#include "cuda/tile/wgmma/work_tile.cuh"

namespace dlattn::sm90 {

// Tile `index`; its sequence's keys are those in use.
__device__ __forceinline__ tile::SequenceTile cached_tile(const AttentionParams& params,
                                                          const LaunchShape& shape, int block_m,
                                                          unsigned index) {
  tile::SequenceTile work = params.cu_seqlens_q
                                ? tile::varlen_tile<false>(params, shape, block_m, index, nullptr)
                                : tile::fixed_lengths(params, tile::scheduled_tile(shape, index));
  work.seqlen_k = static_cast<int>(params.seqlen_k);
  if (params.seqused_k) work.seqlen_k = min(max(params.seqused_k[work.batch], 0), work.seqlen_k);
  return work;
}

// As produce(), for keys in a cache, by two warps: the first one copies K, the second one Q and V,
// whose first tile is wanted later than K's. A lane copies a box, which is of one page. All lanes
// look up a page each at once, for several tiles, before the warp waits for the first one's stage:
// what a producer computes for each tile slows down the consumers' warps beside it.
template <int kHeadDim, int kHeadDimV, Variant kVariant>
struct CachedProducer {
  static constexpr TileShape kShape = tile_shape(kHeadDim, kHeadDimV, kVariant);
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kBlockM = block_m(kShape);
  static constexpr int kWarps = 2;
  static_assert(kBlockN / 8 <= 32 && 32 % (kBlockN / 8) == 0, "a lane for each box of a tile");

  const AttentionParams& params;
  const LaunchShape& shape;
  const KernelArgs& args;
  const Shared<kHeadDim, kHeadDimV, kVariant>& shared;
  const bool values = threadIdx.x >= 32;  // whether the warp copies V
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int box_rows = cuda::page_box_rows(params, kBlockN);
  // Which of the tiles whose pages are looked up at once its box is of, and the box's first row.
  const int lane_tile = lane * box_rows / kBlockN, lane_row = lane * box_rows % kBlockN;
  const int page_rows = values ? args.v_page_rows : args.k_page_rows;
  unsigned use = 0;        // of the stages of K or V
  unsigned query_use = 0;  // of those of Q

  __device__ __forceinline__ void run() {
    if (values) ptx::prefetch_tensor_map(args.q);
    ptx::prefetch_tensor_map(values ? args.v : args.k);
    const tile::RoundRobin scheduler{shape, args.num_work_tiles};
    for (unsigned round = 0;; ++round) {
      const unsigned index = scheduler.index(round);
      if (index >= scheduler.count) break;
      const tile::SequenceTile work = cached_tile(params, shape, kBlockM, index);
      if (work.seqlen_q == 0) continue;
      if (values) copy_queries(work);
      ++query_use;
      copy_keys(work);
    }
    if (values && lane == 0) {
      tile::wgmma::hand_over(shared, query_use, tile::SequenceTile{});  // that was all
      shared.queries.begin_fill(query_use, 0);
    }
  }

 private:
  __device__ __forceinline__ void copy_queries(const tile::SequenceTile& work) const {
    if (lane > 0) return;
    tile::wgmma::hand_over(shared, query_use, work);
    const ptx::SmemAddress arrived = shared.queries.begin_fill(query_use, shared.kQueryBytes);
    tile::with_query_boxes(params, work, [&](const auto& queries) {
#pragma unroll
      for (int c = 0; c < row_groups(kShape); ++c) {
#pragma unroll
        for (int d = 0; d < kHeadDim; d += kBlockColumns) {
          queries.load(shared.q(query_use, c) + tile_bytes(kWarpgroupRows, d), args.q, arrived, d,
                       work.m_block * kBlockM + c * kWarpgroupRows);
        }
      }
    });
  }

  __device__ __forceinline__ void copy_keys(const tile::SequenceTile& work) {
    const int head_kv = static_cast<int>(shape.heads_per_kv_head.quotient(work.head));
    const int first = work.m_block * kBlockM, last = min(first + kBlockM, work.seqlen_q) - 1;
    const tile::Mask mask = tile::wgmma::position_mask(params, shape, work);
    const tile::Range seen = mask.any_row(first, last);
    const tile::Range tiles = tile::wgmma::visible_tiles(mask, first, last, kBlockN);
    for (int left = tiles.end - tiles.begin; left > 0;) {
      const int tile = tiles.begin + left - 1 - lane_tile;
      tile::VarlenBoxes box{};
      if (lane_tile < left) {
        const tile::CacheSource source(params, work.batch);
        box = tile::page_box_of(source, seen, head_kv, work.seqlen_k, tile * kBlockN + lane_row,
                                box_rows, page_rows);
      }
      const int looked_up = min(32 * box_rows / kBlockN, left);
      if (values) {
        // Further columns are never stored.
        const int columns = static_cast<int>(params.head_dim_v);
        copy(box, looked_up, args.v, shared.values, shared.v(0), shared.kValueBytes,
             tile_bytes(kBlockN, columns), columns);
      } else {
        copy(box, looked_up, args.k, shared.keys, shared.k(0), shared.kKeyBytes, shared.kKeyBytes,
             kHeadDim);
      }
      left -= looked_up;
    }
  }

  // Fills a stage with each of `tiles` tiles, by the lanes that have their boxes. `bytes`: those of
  // a tile.
  template <typename Stages>
  __device__ __forceinline__ void copy(const tile::VarlenBoxes& box, int tiles,
                                       const ptx::TensorMap& map, const Stages& stages,
                                       ptx::SmemAddress to, int stage_bytes, int bytes,
                                       int columns) {
#pragma unroll 1
    for (int i = 0; i < tiles; ++i, ++use) {
      stages.wait_empty(use);
      const bool own = i == lane_tile;
      if (own && lane_row == 0) ptx::mbarrier_arrive_expect_tx(stages.full_barrier(use), bytes);
      __syncwarp();  // the stage's barrier expects the boxes
      if (own) {
#pragma unroll
        for (int d = 0; d < kHeadDim; d += kBlockColumns) {
          if (d < columns) {
            box.load(to + stages.stage(use) * stage_bytes + tile_bytes(kBlockN, d) +
                         lane_row * kBlockRowBytes,
                     map, stages.full_barrier(use), d, 0);
          }
        }
      }
    }
  }
};

}  // namespace dlattn::sm90
