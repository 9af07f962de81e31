#pragma once

// As kernel.cuh, with two warps on each of an SM's four schedulers that take turns at the tensor
// cores: left to themselves, both come to work on products at the same time, and then on
// exponentials.
//
// The loop over tiles that all rows see is rotated: a turn is the product of a tile's probabilities
// with V and the scores of the next tile, and the next tile's probabilities fall into the other
// warp's turn. As the former are used up before the latter come, that takes no further registers.
// There is one block per SM, and shared memory for more stages than are on their way: so a warp
// finds the stage that it has filled free, though the other's turn ends half a tile after its own.
// The copy engine brings Q, K and V: for compute capability 9.0 and later.

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/wmma/boxes.cuh"
#include "cuda/wmma/bulk_stages.cuh"
#include "cuda/wmma/output.cuh"
#include "cuda/wmma/products.cuh"
#include "cuda/wmma/softmax.cuh"
#include "cuda/wmma/tiles.cuh"
#include "cuda/wmma/traits.h"
#include "cuda/wmma/walk.cuh"

namespace dlattn::wmma {

// Warps w and w + 4 are on the same scheduler. Both take as many turns; the first is warp w's.
struct WarpTurns {
  int warp;

  __device__ __forceinline__ void begin() const {
    if (warp >= 4) pass();
  }
  __device__ __forceinline__ void wait() const { ptx::barrier_sync(kTurnBarrier + warp, 64); }
  __device__ __forceinline__ void pass() const {
    ptx::barrier_arrive(kTurnBarrier + (warp ^ 4), 64);
  }
  // The turn that is left over.
  __device__ __forceinline__ void end() const {
    if (warp < 4) wait();
  }

 private:
  static constexpr int kTurnBarrier = 1;  // and the next seven
};

// Where the keys of a block are, in shared memory, for the lane that has them brought: there is no
// register to spare.
struct KeysAt {
  int last_tile;  // the first row of the last tile, with which the walk begins
  int head, batch;
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(tile_shape(kHeadDim, kTurns).num_warps * 32, 1)
    turns_kernel(const __grid_constant__ AttentionParams params,
                 const __grid_constant__ LaunchShape shape,
                 const __grid_constant__ TensorMaps maps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr TileShape kShape = tile_shape(kHeadDim, kTurns);
  constexpr SmemMap kMap = smem_map(kHeadDim, kTurns);
  constexpr bool kKeepsQ = kShape.query_place == QueryPlace::kRegisters;
  static_assert(kKeepsQ || kShape.query_place == QueryPlace::kSmem);
  constexpr int kRowTiles = kShape.row_tiles;
  constexpr int kBlockM = block_m(kShape);
  constexpr int kBlockN = kShape.block_n;
  constexpr int kStages = kShape.stages;
  constexpr int kStage = kBlockN * kHeadDim * 2;  // bytes
  constexpr int kLookahead = 2;                   // tiles on their way
  constexpr int kWarpRows = kRowTiles * 16;
  static_assert(kShape.num_warps == 8 && kLookahead < kStages);
  using Mask = tile::RowMask<false>;

  const tile::Rows<false> rows{shape};
  const tile::Work work = rows.work(blockIdx.x, params);
  ptx::wait_for_grids_ahead();
  const tile::Sequence<T> seq(params, shape, work);
  const int m0 = work.m_block * kBlockM;
  const int num_rows = rows.count(seq.seqlen_q);
  if (m0 >= num_rows) return;

  const int lane_idx = threadIdx.x % 32;
  const WarpTurns turns{static_cast<int>(threadIdx.x / 32)};
  // Under causality the first rows see least of the edge tiles, the last ones most: a scheduler
  // gets some of both.
  const int strip = turns.warp < 4 ? turns.warp : 11 - turns.warp;
  const int warp_row = strip * kWarpRows;  // first row of this warp in the tile
  unsigned char* smem = ptx::dynamic_smem();
  const ptx::SmemAddress sQ = ptx::smem_address(smem) + kMap.q;
  const ptx::SmemAddress sK = ptx::smem_address(smem) + kMap.k;
  const ptx::SmemAddress sV = ptx::smem_address(smem) + kMap.v;
  const ptx::SmemAddress lane_q =
      sQ + warp_row * kHeadDim * 2 + lane_place_down<kHeadDim, kWarpRows>(lane_idx);

  const TileRange tiles(Mask(shape, seq.shift, seq.seqlen_k), m0, min(m0 + kBlockM, num_rows) - 1,
                        kBlockN);
  // Tiles are counted in the order of the walk from here on.
  const unsigned num_tiles = tiles.end - tiles.begin;
  const unsigned first_whole = tiles.end - tiles.full_end;
  const unsigned end_whole = tiles.end - tiles.full_begin;
  const BulkStages<kShape.num_warps, kStages> stages(ptx::smem_address(smem) + kMap.mbarriers);
  SpeculativeSoftmax<kRowTiles> softmax;
  float acc_o[kRowTiles][kHeadDim / 8][4] = {};
  std::uint32_t rQ[kHeadDim / 16][kRowTiles][4];  // unless Q is read from shared memory

  // One tile after the other is a warp's to have brought: if all were one's, the others would wait
  // for it.
  KeysAt* const keys_at = reinterpret_cast<KeysAt*>(smem + kMap.coordinates) + turns.warp;
  const auto copy_tile = [&](unsigned i) {
    if (i % kShape.num_warps == static_cast<unsigned>(turns.warp) && lane_idx == 0 &&
        i < num_tiles) {
      const ptx::SmemAddress full = stages.begin_fill(i, 2 * kStage);
      const int stage = i % kStages * kStage;
      const KeysAt at = *keys_at;
      const int row = at.last_tile - static_cast<int>(i) * kBlockN;
      load_rows<kHeadDim, kBlockN>(sK + stage, maps.k, maps.whole_segments, full, row, at.head,
                                   at.batch);
      load_rows<kHeadDim, kBlockN>(sV + stage, maps.v, maps.whole_segments, full, row, at.head,
                                   at.batch);
    }
    __syncwarp();
  };
  if (num_tiles > 0) {
    if (lane_idx == 0) {
      *keys_at = {(tiles.end - 1) * kBlockN,
                  static_cast<int>(shape.heads_per_kv_head.quotient(work.head)), work.batch};
      const ptx::SmemAddress full = stages.query(turns.warp);
      ptx::mbarrier_arrive_expect_tx(full, kWarpRows * kHeadDim * 2);
      load_rows<kHeadDim, kWarpRows>(sQ + warp_row * kHeadDim * 2, maps.q, maps.whole_segments,
                                     full, m0 + warp_row, work.head, work.batch);
    }
#pragma unroll
    for (int i = 0; i < kLookahead; ++i) copy_tile(i);
    stages.wait_query(turns.warp, 0);
    if constexpr (kKeepsQ) {
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 16) load_q<kHeadDim, kWarpRows>(rQ[d / 16], lane_q, d);
    }
  }

  // What is needed after the loop or seldom in it is worked out again rather than kept: there is no
  // register to spare in the loop.
  const auto recall_work = [&] { return rows.work(ptx::reread_block_index(), params); };
  const auto load_q_block = [&](std::uint32_t (&a)[kRowTiles][4], int d) {
    if constexpr (kKeepsQ) {
      memcpy(a, rQ[d / 16], sizeof a);
    } else {
      load_q<kHeadDim, kWarpRows>(a, lane_q, d);
    }
  };
  const auto lane_k = [&](unsigned i) {
    return sK + i % kStages * kStage + lane_place_across<kHeadDim, kBlockN>(lane_idx);
  };
  const auto lane_v = [&](unsigned i) {
    return sV + i % kStages * kStage + lane_place_down<kHeadDim, kBlockN>(lane_idx);
  };

  unsigned i = 0;  // the tile
  const auto attend_edge_tile = [&] {
    stages.wait_full(i);
    copy_tile(i + kLookahead);
    const tile::Sequence<T> same(params, shape, recall_work());
    const Mask mask(shape, same.shift, same.seqlen_k);
    const int first_row = recall_work().m_block * kBlockM + warp_row;
    attend_edge<T, kHeadDim, kBlockN, kShape.edge_keys, kBlockN>(
        softmax, acc_o, mask, first_row, tiles.end - 1 - static_cast<int>(i), lane_k(i), lane_v(i),
        shape.scale_log2, lane_idx, load_q_block);
  };
  // From this tile on those that every row sees whole, but for the release of the last one.
  const auto attend_whole_tiles = [&] {
    float acc_s[kRowTiles][kBlockN / 8][4];
    std::uint32_t rP[kRowTiles][kBlockN / 16][4];
    const auto make_scores = [&] {
      multiply_qk<T, kHeadDim, 0, kBlockN, kBlockN>(acc_s, lane_k(i), load_q_block);
    };
    stages.wait_full(i);
    turns.wait();
    make_scores();
    turns.pass();
#pragma unroll 1
    while (true) {
      softmax.template probabilities<T, 0, kBlockN>(acc_s, shape.scale_log2, rP, acc_o,
                                                    make_scores);
      copy_tile(i + kLookahead);
      if (i + 1 == end_whole) break;
      stages.wait_full(i + 1);
      turns.wait();
      multiply_pv<T, kHeadDim, 0, kBlockN, kBlockN>(acc_o, rP, lane_v(i));
      multiply_qk<T, kHeadDim, 0, kBlockN, kBlockN>(acc_s, lane_k(i + 1), load_q_block);
      turns.pass();
      stages.release(i, lane_idx);
      ++i;
    }
    turns.wait();
    multiply_pv<T, kHeadDim, 0, kBlockN, kBlockN>(acc_o, rP, lane_v(i));
    turns.pass();
  };
  turns.begin();
  for (unsigned end_edge = first_whole;; end_edge = num_tiles) {
    for (; i < end_edge; ++i) {
      attend_edge_tile();
      stages.release(i, lane_idx);
    }
    if (i == num_tiles) break;
    if (i < end_whole) {
      attend_whole_tiles();
      stages.release(i, lane_idx);
      ++i;
    }
  }
  turns.end();

  const tile::Work done = recall_work();
  write_results<kHeadDim, false, false>(params, shape, tile::OutputRows<T>(params, done), rows,
                                        done.head, done.m_block * kBlockM + warp_row, softmax,
                                        acc_o, smem + kMap.q + warp_row * kHeadDim * 2, lane_idx);
#endif
}

}  // namespace dlattn::wmma
