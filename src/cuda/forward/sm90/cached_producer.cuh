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

// As produce(), for keys in a cache, by two warps: the first one copies Q and K, the second one V.
// Each lane copies boxes of a page, which it looks up before it waits for the stage.
template <int kHeadDim, int kHeadDimV, Variant kVariant>
struct CachedProducer {
  static constexpr TileShape kShape = tile_shape(kHeadDim, kHeadDimV, kVariant);
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kBlockM = block_m(kShape);
  static constexpr int kWarps = 2;
  static_assert(kBlockN / 8 <= 32, "a lane for each box");

  const AttentionParams& params;
  const LaunchShape& shape;
  const KernelArgs& args;
  const Shared<kHeadDim, kHeadDimV, kVariant>& shared;
  const bool values = threadIdx.x >= 32;  // whether the warp copies V
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int box_rows = cuda::page_box_rows(params, kBlockN);
  const int lane_row = lane * box_rows;  // its box's first row of a tile, if below kBlockN
  const int page_rows = values ? args.v_page_rows : args.k_page_rows;
  unsigned use = 0;        // of the stages of K or V
  unsigned query_use = 0;  // of those of Q

  __device__ __forceinline__ void run() {
    ptx::prefetch_tensor_map(args.q);
    ptx::prefetch_tensor_map(values ? args.v : args.k);
    const tile::RoundRobin scheduler{shape, args.num_work_tiles};
    for (unsigned round = 0;; ++round) {
      const unsigned index = scheduler.index(round);
      if (index >= scheduler.count) break;
      const tile::SequenceTile work = cached_tile(params, shape, kBlockM, index);
      if (work.seqlen_q == 0) continue;
      if (!values) copy_queries(work);
      ++query_use;
      copy_keys(work);
    }
    if (!values && lane == 0) {
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
    for (int n = tiles.end - 1; n >= tiles.begin; --n, ++use) {
      tile::VarlenBoxes box{};
      if (lane_row < kBlockN) {
        const tile::CacheSource source(params, work.batch);
        box = tile::page_box_of(source, seen, head_kv, work.seqlen_k, n * kBlockN + lane_row,
                                box_rows, page_rows);
      }
      if (values) {
        // Further columns are never stored.
        const int columns = static_cast<int>(params.head_dim_v);
        copy(box, args.v, shared.values, shared.v(use), tile_bytes(kBlockN, columns), columns);
      } else {
        copy(box, args.k, shared.keys, shared.k(use), shared.kKeyBytes, kHeadDim);
      }
    }
  }

  // The lane's box to its rows of a stage. `bytes`: those of all lanes.
  template <typename Stages>
  __device__ __forceinline__ void copy(const tile::VarlenBoxes& box, const ptx::TensorMap& map,
                                       const Stages& stages, ptx::SmemAddress to, int bytes,
                                       int columns) const {
    if (lane == 0) stages.begin_fill(use, bytes);
    __syncwarp();  // the stage is empty, and its barrier expects the boxes
    if (lane_row >= kBlockN) return;
#pragma unroll
    for (int d = 0; d < kHeadDim; d += kBlockColumns) {
      if (d < columns) {
        box.load(to + tile_bytes(kBlockN, d) + lane_row * kBlockRowBytes, map,
                 stages.full_barrier(use), d, 0);
      }
    }
  }
};

}  // namespace dlattn::sm90
