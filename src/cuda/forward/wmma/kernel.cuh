#pragma once

// Attention on tensor cores with warp-level instructions (mma.sync, ldmatrix, cp.async); scores and
// probabilities never leave registers.
//
// A thread block of 4 or 8 warps computes block_m query rows of one head; a warp owns 16 or 32 of
// them, start to end, with the unnormalised fp32 output in registers. Tiles of block_n keys are
// walked from the last to the first: so ragged and causal edges come first, as edge tiles, and the
// long loop after them has no mask and no bounds. (A window brings edge tiles at the end as well.)
// Per tile:
//   1. wait for K and V, one barrier, start the copy of the next tile into the other stage;
//   2. S = Q K^T; on edge tiles the mask;
//   3. per slice of keys: probabilities, in place and then packed as operands (SpeculativeSoftmax),
//      then O += P V.
// At the end a row's sum is reduced over its four lanes, and the output goes through the warp's own
// rows of shared memory into 16-byte stores.
// Shared memory: see SmemMap. The one barrier of a tile both publishes its K and V and frees the
// other stage.

#include "cuda/forward/wmma/copy.cuh"
#include "cuda/forward/wmma/output.cuh"
#include "cuda/forward/wmma/products.cuh"
#include "cuda/forward/wmma/softmax.cuh"
#include "cuda/forward/wmma/stages.cuh"
#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/forward/wmma/traits.h"
#include "cuda/forward/wmma/walk.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma {

template <typename T, int kHeadDim, int kVariant, bool kPacked = false>
__global__ void __launch_bounds__(tile_shape(kHeadDim, kVariant).num_warps * 32,
                                  tile_shape(kHeadDim, kVariant).blocks_per_sm)
    kernel(const __grid_constant__ AttentionParams params,
           const __grid_constant__ LaunchShape shape) {
  constexpr TileShape kShape = tile_shape(kHeadDim, kVariant);
  constexpr SmemMap kMap = smem_map(kHeadDim, kVariant);
  constexpr QueryPlace kQueryPlace = kShape.query_place;
  constexpr int kRowTiles = kShape.row_tiles;
  constexpr int kBlockM = block_m(kShape);
  constexpr int kBlockN = kShape.block_n;
  constexpr int kStages = kShape.stages;
  constexpr int kStage = kBlockN * kHeadDim * 2;  // bytes
  static_assert(!kPacked || packs_heads(kVariant));
  using Mask = tile::RowMask<kPacked>;
  using Copy = TileCopy<T, kHeadDim, kShape.num_warps * 32>;
  constexpr Handover kHandover = resolved(kShape.handover);
  // Where warps run ahead of each other, none waits in the long loop for its stage to be free
  // before it must. Edge tiles are too few for warps to be apart, and their copies are waited for.
  // In small blocks of short rows the copies' instructions had better not delay the first products.
  constexpr bool kCopyLate =
      kHandover == Handover::kMbarrier || (kVariant == kNarrow && kHeadDim <= 64);

  const tile::Rows<kPacked> rows{shape};
  const tile::WorkTile work = rows.work(blockIdx.x);
  ptx::wait_for_grids_ahead();
  const tile::Sequence<T> seq(params, shape, work);
  const int m0 = work.m_block * kBlockM;
  const int num_rows = rows.count(seq.seqlen_q);
  if (m0 >= num_rows) return;

  const int lane_idx = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * kRowTiles * 16;  // first row of this warp in the tile
  const int head_dim = static_cast<int>(params.head_dim);
  const int head_dim_v = static_cast<int>(params.head_dim_v);
  unsigned char* smem = ptx::dynamic_smem();
  const ptx::SmemAddress sQ = ptx::smem_address(smem) + kMap.q;
  const ptx::SmemAddress sK = ptx::smem_address(smem) + kMap.k;
  const ptx::SmemAddress sV = ptx::smem_address(smem) + kMap.v;
  const ptx::SmemAddress lane_q =
      sQ + warp_row * kHeadDim * 2 + lane_place_down<kHeadDim>(lane_idx);

  const TileRange tiles(Mask(shape, seq.shift, seq.seqlen_k), m0, min(m0 + kBlockM, num_rows) - 1,
                        kBlockN);

  const Stages<kShape.num_warps, kHandover, kStages> stages(ptx::smem_address(smem) +
                                                            kMap.mbarriers);
  SpeculativeSoftmax<kRowTiles> softmax;
  float acc_o[kRowTiles][kHeadDim / 8][4] = {};
  std::uint32_t rQ[kHeadDim / 16][kRowTiles][4];  // unless Q is read from shared memory

  // Q and the last tile of K and V, the only ones that may be ragged.
  const auto copy_last_tile = [&] {
    const std::int64_t n0 = (tiles.end - 1) * kBlockN;
    const int keys = seq.seqlen_k - static_cast<int>(n0);
    Copy::template edge<kBlockN>(sK, seq.keys.k.row(n0), seq.keys.k.stride, keys, head_dim);
    Copy::template edge<kBlockN>(sV, seq.keys.v.row(n0), seq.keys.v.stride, keys, head_dim_v);
    stages.publish(0);
  };
  const T* next_k = nullptr;  // where the copy of the next tile begins
  const T* next_v = nullptr;
  if (tiles.begin < tiles.end) {
    if constexpr (kPacked) {
      const auto row_address = [&](int row) {
        return seq.q + rows.offset(m0 + row, params.q.row_stride, params.q.head_stride);
      };
      Copy::template gather<kBlockM>(sQ, row_address, num_rows - m0, head_dim);
    } else {
      Copy::template edge<kBlockM>(sQ, seq.q + m0 * params.q.row_stride, params.q.row_stride,
                                   num_rows - m0, head_dim);
    }
    if constexpr (kQueryPlace != QueryPlace::kRegistersOverlaid) copy_last_tile();
    if constexpr (kQueryPlace != QueryPlace::kSmem) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 16) load_q<kHeadDim>(rQ[d / 16], lane_q, d);
    }
    if constexpr (kQueryPlace == QueryPlace::kRegistersOverlaid) {
      __syncthreads();  // all warps have Q: K and V may overwrite it
      copy_last_tile();
    }
    const int next = (tiles.end - 2) * kBlockN;
    next_k = Copy::template last_row<kBlockN>(seq.keys.k, next);
    next_v = Copy::template last_row<kBlockN>(seq.keys.v, next);
  }
  const int count = tiles.end - tiles.begin;
  int i = 0;  // how many tiles have been walked

  // What is needed after the loop or seldom in it is worked out again rather than kept, where there
  // is no register to spare in the loop.
  constexpr bool kScarce = kHeadDim > 64;
  const auto recall_work = [&] { return kScarce ? rows.work(ptx::reread_block_index()) : work; };
  const auto recall_sequence = [&] {
    if constexpr (kScarce) {
      return tile::Sequence<T>(params, shape, recall_work());
    } else {
      return seq;
    }
  };

  const auto copy_next_tile = [&] {
    if (i + 1 >= count) return;
    if (i > 0) stages.wait_empty(i - 1);
    const int next = kStage - i % kStages * kStage;  // in bytes
    Copy::template whole<kBlockN>(sK + next, next_k, params.k.row_stride, head_dim);
    Copy::template whole<kBlockN>(sV + next, next_v, params.v.row_stride, head_dim_v);
    stages.publish(i + 1);
  };
  const auto load_q_block = [&](std::uint32_t (&a)[kRowTiles][4], int d) {
    if constexpr (kQueryPlace == QueryPlace::kSmem) {
      load_q<kHeadDim>(a, lane_q, d);
    } else {
      memcpy(a, rQ[d / 16], sizeof a);
    }
  };
  const auto lane_k = [&] {
    return sK + i % kStages * kStage + lane_place_across<kHeadDim>(lane_idx);
  };
  const auto lane_v = [&] {
    return sV + i % kStages * kStage + lane_place_down<kHeadDim>(lane_idx);
  };
  const auto full = [&] {
    stages.wait_full(i);
    if constexpr (!kCopyLate) copy_next_tile();
    float acc_s[kRowTiles][kBlockN / 8][4];
    multiply_qk<T, kHeadDim, 0, kBlockN>(acc_s, lane_k(), load_q_block);
    constexpr int kSliceKeys = kBlockN / kShape.slices;
    int keys = 0;
    const auto slice = [&](auto index, const auto& go_on) {
      constexpr int kFirst = decltype(index)::value * kSliceKeys;
      if (!softmax.template speculate<kFirst, kSliceKeys>(acc_s, shape.scale_log2, acc_o)) return;
      std::uint32_t rP[kRowTiles][kSliceKeys / 16][4];
      softmax.template pack<T, kFirst, kSliceKeys>(acc_s, rP);
      if constexpr (kCopyLate && kFirst == 0) copy_next_tile();
      multiply_pv<T, kHeadDim, kFirst, kSliceKeys>(acc_o, rP, lane_v());
      keys = kFirst + kSliceKeys;
      go_on();
    };
    chain_slices<kShape.slices>(slice);
    if (keys == kBlockN) stages.release(i, lane_idx);
    return keys;
  };
  const auto edge = [&](int n, int begin, bool begun) {
    if (!begun) stages.wait_full(i);
    if (!begun || (kCopyLate && begin == 0)) copy_next_tile();
    const tile::Sequence<T> same = recall_sequence();
    const Mask mask(shape, same.shift, same.seqlen_k);
    const int first_row = recall_work().m_block * kBlockM + warp_row;
    attend_edge<T, kHeadDim, kBlockN, kShape.edge_keys>(softmax, acc_o, mask, first_row, n, begin,
                                                        lane_k(), lane_v(), shape.scale_log2,
                                                        lane_idx, load_q_block);
    stages.release(i, lane_idx);
  };
  // Where registers are enough for them at edge tiles.
  constexpr bool kKeepsTiles = !kScarce || kShape.blocks_per_sm <= 2;
  walk_tiles<kBlockN, kKeepsTiles>(i, tiles, softmax, full, edge, [&] {
    if constexpr (!kScarce) return tiles;
    const tile::Sequence<T> same = recall_sequence();
    const int first = recall_work().m_block * kBlockM;
    return TileRange(Mask(shape, same.shift, same.seqlen_k), first,
                     min(first + kBlockM, rows.count(same.seqlen_q)) - 1, kBlockN);
  });

  const tile::WorkTile done = recall_work();
  write_results<kHeadDim, false, kQueryPlace == QueryPlace::kRegistersOverlaid>(
      params, shape, tile::ResultRows<T>(params, done), rows, done.m_block * kBlockM + warp_row,
      softmax, shape.scale_log2, acc_o, smem + kMap.q + warp_row * kHeadDim * 2, lane_idx);
}

}  // namespace dlattn::wmma
