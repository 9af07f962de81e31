#pragma once

// As kernel.cuh, where the copy engine ("TMA") brings Q, K and V.
//
// A block takes one work item (block_m rows of a head) after the other. Copies of K and V run ahead
// of the products by a few tiles, from one item into the next, and a warp has its rows of the next
// item's Q brought when it has those of this one in registers: so an item's first tiles come while
// the one before is worked on. One lane starts the copy of a tile, of each warp in turn. Results go
// from registers to global memory, for the place of Q has the next item's.
// All barriers are mbarriers (BulkStages), and the warp that is furthest behind never waits for
// another: what it waits for has been started, by itself or by warps further on.

#include "cuda/forward/wmma/boxes.cuh"
#include "cuda/forward/wmma/bulk_stages.cuh"
#include "cuda/forward/wmma/direct_output.cuh"
#include "cuda/forward/wmma/products.cuh"
#include "cuda/forward/wmma/softmax.cuh"
#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/forward/wmma/traits.h"
#include "cuda/forward/wmma/walk.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma {

// The work tiles of a block.
struct BulkTiles : tile::PairedTiles {
  const AttentionParams& params;

  __device__ __forceinline__ BulkTiles(const AttentionParams& params, const LaunchShape& shape)
      : PairedTiles{shape, shape.num_m_blocks.divisor() * shape.num_heads.divisor() *
                               static_cast<unsigned>(params.batch_size)},
        params(params) {}
};

// A work item: which rows, and the tiles of keys that they see.
template <int kBlockM, int kBlockN>
struct BulkItem {
  tile::WorkTile work;
  int m0;  // its first row
  tile::Mask mask;
  TileRange tiles;

  __device__ __forceinline__ BulkItem(const BulkTiles& order, unsigned index)
      : work(order.tile(index)),
        m0(work.m_block * kBlockM),
        mask(order.shape,
             position_shift(order.params.causal, static_cast<int>(order.params.seqlen_q),
                            static_cast<int>(order.params.seqlen_k)),
             static_cast<int>(order.params.seqlen_k)),
        tiles(mask, m0, min(m0 + kBlockM, static_cast<int>(order.params.seqlen_q)) - 1, kBlockN) {}
};

// Copies of K and V, tile by tile of one item after the other. Tiles are counted over all items of
// a block; every kNumWarps-th is a warp's to have brought. Where its last one is, its first lane
// keeps in shared memory: registers are scarce.
struct BulkCursor {
  unsigned item;
  int n, begin;  // the tile, and the item's last one
  int head_kv, batch;
};

// The item that a warp works on, in shared memory as well where Q leaves registers none.
struct WarpItem {
  unsigned item;
  unsigned done;  // items before it
};

template <int kHeadDim>
__device__ __forceinline__ WarpItem* warp_item(int warp) {
  static_assert(sizeof(BulkCursor) + sizeof(WarpItem) <= kCoordinateBytes);
  return reinterpret_cast<WarpItem*>(ptx::dynamic_smem() + smem_map(kHeadDim, kBulk).coordinates +
                                     warp * kCoordinateBytes + sizeof(BulkCursor));
}

template <int kHeadDim>
struct BulkCopies {
  static constexpr TileShape kShape = tile_shape(kHeadDim, kBulk);
  static constexpr SmemMap kMap = smem_map(kHeadDim, kBulk);
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kStage = kBlockN * kHeadDim * 2;  // bytes
  using Item = BulkItem<block_m(kShape), kBlockN>;
  using BlockStages = BulkStages<kShape.num_warps, kShape.stages>;

  const BulkTiles& order;
  const TensorMaps& maps;
  const BlockStages& stages;

  // By all warps' first lanes, before the rest.
  __device__ __forceinline__ void init() const { *cursor() = {order.before_first(), 0, 0, 0, 0}; }

  // Has tile `i` brought, if it is this thread's and there is one.
  __device__ __forceinline__ void bring(unsigned i) const {
    if (threadIdx.x != i % kShape.num_warps * 32) return;
    BulkCursor at = *cursor();
    int steps = i < kShape.num_warps ? i + 1 : kShape.num_warps;
    while (steps > at.n - at.begin) {
      steps -= at.n - at.begin;
      const unsigned item = order.next(at.item);
      if (item >= order.count) return;
      at = ahead_of(item);
    }
    at.n -= steps;
    *cursor() = at;
    const ptx::SmemAddress smem = ptx::smem_address(ptx::dynamic_smem());
    const ptx::SmemAddress full = stages.begin_fill(i, 2 * kStage);
    const int stage = i % kShape.stages * kStage;
    load_rows<kHeadDim, kBlockN>(smem + kMap.k + stage, maps.k, maps.whole_segments, full,
                                 {at.head_kv, at.batch}, at.n * kBlockN);
    load_rows<kHeadDim, kBlockN>(smem + kMap.v + stage, maps.v, maps.whole_segments, full,
                                 {at.head_kv, at.batch}, at.n * kBlockN);
  }

 private:
  __device__ __forceinline__ static BulkCursor* cursor() {
    static_assert(sizeof(BulkCursor) <= kCoordinateBytes);
    return reinterpret_cast<BulkCursor*>(ptx::dynamic_smem() + kMap.coordinates +
                                         threadIdx.x / 32 * kCoordinateBytes);
  }
  // A step ahead of an item's first tile.
  __device__ __forceinline__ BulkCursor ahead_of(unsigned item) const {
    const Item next(order, item);
    return {item, next.tiles.end, next.tiles.begin,
            static_cast<int>(order.shape.heads_per_kv_head.quotient(next.work.head)),
            next.work.batch};
  }
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(tile_shape(kHeadDim, kBulk).num_warps * 32,
                                  tile_shape(kHeadDim, kBulk).blocks_per_sm)
    bulk_kernel([[maybe_unused]] const __grid_constant__ AttentionParams params,
                [[maybe_unused]] const __grid_constant__ LaunchShape shape,
                [[maybe_unused]] const __grid_constant__ TensorMaps maps) {
// Devices of 12.0 and later have less shared memory than a block takes: the plan refuses them.
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
  constexpr TileShape kShape = tile_shape(kHeadDim, kBulk);
  constexpr SmemMap kMap = smem_map(kHeadDim, kBulk);
  constexpr bool kInRegisters = kShape.query_place == QueryPlace::kRegisters;
  constexpr int kRowTiles = kShape.row_tiles;
  constexpr int kWarpRows = kRowTiles * 16;
  constexpr int kQueryBytes = kWarpRows * kHeadDim * 2;  // a warp's rows
  constexpr int kBlockN = kShape.block_n;
  constexpr int kStages = kShape.stages;
  constexpr int kStage = kBlockN * kHeadDim * 2;  // bytes
  constexpr unsigned kLookahead = kStages / 2;    // tiles on their way beyond this one
  static_assert(kLookahead < kStages);
  using Item = BulkItem<block_m(kShape), kBlockN>;

  const ptx::SmemAddress smem = ptx::smem_address(ptx::dynamic_smem());
  const BulkStages<kShape.num_warps, kStages> stages(smem + kMap.mbarriers);
  ptx::wait_for_grids_ahead();
  const int lane_idx = threadIdx.x % 32;
  const int warp_idx = threadIdx.x / 32;
  const ptx::SmemAddress sQ = smem + kMap.q + warp_idx * kQueryBytes;
  const BulkTiles order(params, shape);
  const unsigned num_items = order.count;
  const auto load_queries = [&](unsigned item) {
    if (lane_idx != 0 || item >= num_items) return;
    const tile::WorkTile work = order.tile(item);
    ptx::mbarrier_arrive_expect_tx(stages.query(warp_idx), kQueryBytes);
    load_rows<kHeadDim, kWarpRows>(sQ, maps.q, maps.whole_segments, stages.query(warp_idx),
                                   {work.head, work.batch},
                                   work.m_block * block_m(kShape) + warp_idx * kWarpRows);
  };
  const unsigned first_item = order.next(order.before_first());
  load_queries(first_item);
  const BulkCopies<kHeadDim> copies{order, maps, stages};
  if (lane_idx == 0) copies.init();
#pragma unroll
  for (unsigned ahead = 0; ahead < kLookahead; ++ahead) copies.bring(ahead);

  const ptx::SmemAddress lane_q = sQ + lane_place_down<kHeadDim, kWarpRows>(lane_idx);
  int i = 0;  // tiles that have been walked, of all items
  WarpItem own;
  WarpItem& at = kInRegisters ? own : *warp_item<kHeadDim>(warp_idx);
  const auto begin_item = [&](unsigned item, unsigned done) {
    if constexpr (!kInRegisters) __syncwarp();  // all lanes have done with the one before
    if (kInRegisters || lane_idx == 0) at = {item, done};
    if constexpr (!kInRegisters) __syncwarp();
  };
  begin_item(first_item, 0);
#pragma unroll 1
  for (; at.item < num_items; begin_item(order.next(at.item), at.done + 1)) {
    SpeculativeSoftmax<kRowTiles> softmax;
    float acc_o[kRowTiles][kHeadDim / 8][4] = {};
    std::uint32_t rQ[kHeadDim / 16][kRowTiles][4];  // unless Q is read from shared memory
    stages.wait_query(warp_idx, at.done);
    const auto load_next_queries = [&] {
      __syncwarp();  // all lanes have done with this item's
      load_queries(order.next(at.item));
    };
    if constexpr (kInRegisters) {
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 16) load_q<kHeadDim, kWarpRows>(rQ[d / 16], lane_q, d);
      load_next_queries();
    }
    const auto load_q_block = [&](std::uint32_t (&a)[kRowTiles][4], int d) {
      if constexpr (kInRegisters) {
        memcpy(a, rQ[d / 16], sizeof a);
      } else {
        load_q<kHeadDim, kWarpRows>(a, lane_q, d);
      }
    };
    // Where a lane's part of tile i begins. Of edge tiles both arguments are reread, so that no
    // register keeps what comes of them.
    const auto lane_k = [&](ptx::SmemAddress smem, int lane) {
      return smem + kMap.k + i % kStages * kStage + lane_place_across<kHeadDim, kBlockN>(lane);
    };
    const auto lane_v = [&](ptx::SmemAddress smem, int lane) {
      return smem + kMap.v + i % kStages * kStage + lane_place_down<kHeadDim, kBlockN>(lane);
    };
    const auto full = [&] {
      stages.wait_full(i);
      float acc_s[kRowTiles][kBlockN / 8][4];
      multiply_qk<T, kHeadDim, 0, kBlockN, kBlockN>(acc_s, lane_k(smem, lane_idx), load_q_block);
      constexpr int kSliceKeys = kBlockN / kShape.slices;
      int keys = 0;
      const auto slice = [&](auto index, const auto& go_on) {
        constexpr int kFirst = decltype(index)::value * kSliceKeys;
        if (!softmax.template speculate<kFirst, kSliceKeys>(acc_s, shape.scale_log2, acc_o)) return;
        std::uint32_t rP[kRowTiles][kSliceKeys / 16][4];
        softmax.template pack<T, kFirst, kSliceKeys>(acc_s, rP);
        if constexpr (kFirst == 0) copies.bring(i + kLookahead);
        multiply_pv<T, kHeadDim, kFirst, kSliceKeys, kBlockN>(acc_o, rP, lane_v(smem, lane_idx));
        keys = kFirst + kSliceKeys;
        go_on();
      };
      chain_slices<kShape.slices>(slice);
      if (keys == kBlockN) stages.release(i, lane_idx);
      return keys;
    };
    const auto edge = [&](int n, int begin, bool begun) {
      if (!begun) stages.wait_full(i);
      if (begin == 0) copies.bring(i + kLookahead);
      const Item same(order, at.item);
      const ptx::SmemAddress again = ptx::reread(smem);
      const int lane = static_cast<int>(ptx::reread(static_cast<unsigned>(lane_idx)));
      attend_edge<T, kHeadDim, kBlockN, kShape.edge_keys, kBlockN>(
          softmax, acc_o, same.mask, same.m0 + warp_idx * kWarpRows, n, begin, lane_k(again, lane),
          lane_v(again, lane), shape.scale_log2, lane_idx, load_q_block);
      stages.release(i, lane_idx);
    };
    const TileRange tiles = Item(order, at.item).tiles;
    const auto tiles_again = [&] {
      if constexpr (kHeadDim <= 64) return tiles;
      return Item(order, at.item).tiles;
    };
    walk_tiles<kBlockN, true>(i, tiles, softmax, full, edge, tiles_again);
    if constexpr (!kInRegisters) load_next_queries();
    const Item done(order, at.item);
    write_from_registers<kHeadDim>(params, tile::ResultRows<T>(params, done.work),
                                   done.m0 + warp_idx * kWarpRows, softmax,
                                   ptx::reread(shape.scale_log2), acc_o, lane_idx);
  }
#endif
}

}  // namespace dlattn::wmma
