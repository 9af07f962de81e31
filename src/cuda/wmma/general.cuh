#pragma once

// The kernel for all that the fast shapes leave out: softcap, ALiBi, bias and mask with any
// strides, rows of any alignment, head dims of any size.
//
// Its tiles are walked as the fast kernel walks them, one body for all. Per tile:
//   1. this lane's part of bias and mask starts on its way to registers;
//   2. wait for K and V, one barrier, start the copy of the next tile into the other stage;
//   3. S = Q K^T, the terms of the scores, on edge tiles the mask by position;
//   4. per slice of keys: probabilities, then O += P V.
// K and V lie in shared memory in the order of RowsByLane, so that the accumulators of a lane hold
// neighbouring keys, of which bias and mask are read by wide loads, straight from global memory.
// Shared memory and barriers are those of the fast kernel.

#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/wmma/copy.cuh"
#include "cuda/wmma/output.cuh"
#include "cuda/wmma/products.cuh"
#include "cuda/wmma/score.cuh"
#include "cuda/wmma/softmax.cuh"
#include "cuda/wmma/tiles.cuh"
#include "cuda/wmma/traits.h"

namespace dlattn::wmma {

// Copies kRows rows whatever they are aligned to. They are complete after a commit, a wait and a
// barrier.
template <typename Copy, int kRows, typename T>
__device__ __forceinline__ void copy_any_rows(unsigned char* smem, const T* gmem,
                                              std::int64_t row_stride, int rows, int columns,
                                              int copy_bytes) {
  if (copy_bytes == 16) {
    Copy::template edge<kRows>(ptx::smem_address(smem), gmem, row_stride, rows, columns);
  } else {
    Copy::template unaligned<kRows>(smem, gmem, row_stride, rows, columns, copy_bytes);
  }
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(tile_shape(kHeadDim, kGeneral).num_warps * 32,
                                  tile_shape(kHeadDim, kGeneral).blocks_per_sm)
    general_kernel(const __grid_constant__ AttentionParams params,
                   const __grid_constant__ LaunchShape shape) {
  constexpr TileShape kShape = tile_shape(kHeadDim, kGeneral);
  constexpr SmemMap kMap = smem_map(kHeadDim, kGeneral);
  constexpr int kNumThreads = kShape.num_warps * 32;
  constexpr int kRowTiles = kShape.row_tiles;
  constexpr int kBlockM = block_m(kShape);
  constexpr int kBlockN = kShape.block_n;
  constexpr int kStage = kBlockN * kHeadDim * 2;  // bytes
  constexpr bool kQueryInRegisters = kShape.query_place != QueryPlace::kSmem;
  constexpr bool kOverlaid = kShape.query_place == QueryPlace::kRegistersOverlaid;
  // Whether registers are: then the copies of the next tile's terms start at the end of this one,
  // not when this one's are read, where K and V are is worked out anew for every tile, and edge
  // tiles have no softmax of their own.
  constexpr bool kScarce = kHeadDim > 192;
  using Terms = LaneTerms<T, kRowTiles, kBlockN, kNumThreads, kScarce>;

  const tile::Work work = tile::scheduled_work(params, shape);
  ptx::wait_for_grids_ahead();
  const tile::Sequence<T> seq(params, shape, work);
  const int m0 = work.m_block * kBlockM;
  if (m0 >= seq.seqlen_q) return;

  const int lane_idx = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * kRowTiles * 16;  // first row of this warp in the tile
  const int head_dim = static_cast<int>(params.head_dim);
  const int head_dim_v = static_cast<int>(params.head_dim_v);
  unsigned char* smem = ptx::dynamic_smem();
  const ptx::SmemAddress lane_q = ptx::smem_address(smem) + kMap.q + warp_row * kHeadDim * 2 +
                                  lane_place_down<kHeadDim>(lane_idx);
  const ptx::SmemAddress lane_k =
      ptx::smem_address(smem) + kMap.k + lane_place_across<kHeadDim>(lane_idx);
  const ptx::SmemAddress lane_v =
      ptx::smem_address(smem) + kMap.v + lane_place_down<kHeadDim>(lane_idx);

  const tile::Mask mask(shape, seq.shift, seq.seqlen_k);
  const TileRange tiles(mask, m0, min(m0 + kBlockM, seq.seqlen_q) - 1, kBlockN);
  const int lane_row = m0 + warp_row + lane_idx / 4;  // its first
  const Terms terms(params, shape, work, lane_row, seq.seqlen_q, lane_idx, smem + kMap.total);
  const float scale_log2 = terms.scale_log2();

  SpeculativeSoftmax<kRowTiles> softmax;
  float acc_o[kRowTiles][kHeadDim / 8][4] = {};
  std::uint32_t rQ[kHeadDim / 16][kRowTiles][4];  // unless Q is read from shared memory

  using KeyCopy = TileCopy<T, kHeadDim, kNumThreads, false, RowsByLane>;
  const T* next_k = nullptr;  // where the copy of the next tile begins, of rows aligned to 16 bytes
  const T* next_v = nullptr;
  // What is needed seldom is worked out again rather than kept: registers are scarce.
  const auto recall_work = [&] {
    return tile::scheduled_work(params, shape, ptx::reread_block_index());
  };
  // The last tile is the only one that may be ragged.
  const auto copy_tile = [&](int n, int stage, bool last) {
    unsigned char* sK = smem + kMap.k + stage;
    unsigned char* sV = smem + kMap.v + stage;
    if (!kScarce && !last && shape.copy_bytes == 16) {
      KeyCopy::template whole<kBlockN>(ptx::smem_address(sK), next_k, params.k_row_stride,
                                       head_dim);
      KeyCopy::template whole<kBlockN>(ptx::smem_address(sV), next_v, params.v_row_stride,
                                       head_dim_v);
    } else {
      const tile::Sequence<T> same(params, shape, recall_work());
      const std::int64_t n0 = n * kBlockN;
      const int keys = same.seqlen_k - static_cast<int>(n0);
      copy_any_rows<KeyCopy, kBlockN>(sK, same.k + n0 * params.k_row_stride, params.k_row_stride,
                                      keys, head_dim, shape.copy_bytes);
      copy_any_rows<KeyCopy, kBlockN>(sV, same.v + n0 * params.v_row_stride, params.v_row_stride,
                                      keys, head_dim_v, shape.copy_bytes);
    }
  };
  const auto copy_terms = [&](int n) {
    terms.copy(n * kBlockN, seq.seqlen_k, n == tiles.end - 1);
    ptx::cp_async_commit();
  };
  if (tiles.begin < tiles.end) {
    copy_any_rows<TileCopy<T, kHeadDim, kNumThreads>, kBlockM>(
        smem + kMap.q, seq.q + m0 * params.q_row_stride, params.q_row_stride, seq.seqlen_q - m0,
        head_dim, shape.copy_bytes);
    if constexpr (!kOverlaid) copy_tile(tiles.end - 1, 0, true);
    ptx::cp_async_commit();
    if constexpr (kQueryInRegisters) {
      ptx::cp_async_wait<0>();
      __syncthreads();
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 16) load_q<kHeadDim>(rQ[d / 16], lane_q, d);
    }
    if constexpr (kOverlaid) {
      __syncthreads();  // all warps have Q: K and V may overwrite it
      copy_tile(tiles.end - 1, 0, true);
      ptx::cp_async_commit();
    }
    copy_terms(tiles.end - 1);
    const int next = (tiles.end - 2) * kBlockN;
    next_k = KeyCopy::template last_row<kBlockN>(seq.k, params.k_row_stride, next);
    next_v = KeyCopy::template last_row<kBlockN>(seq.v, params.v_row_stride, next);
  }

  int stage = 0;  // in bytes
#pragma unroll 1
  for (int n = tiles.end - 1; n >= tiles.begin; --n) {
    ptx::cp_async_wait<1>();  // all but the terms of this tile
    __syncthreads();
    if (n > tiles.begin) copy_tile(n - 1, kStage - stage, false);
    ptx::cp_async_commit();
    float acc_s[kRowTiles][kBlockN / 8][4];
    multiply_qk<T, kHeadDim, 0, kBlockN>(acc_s, lane_k + stage,
                                         [&](std::uint32_t (&a)[kRowTiles][4], int d) {
                                           if constexpr (kQueryInRegisters) {
                                             memcpy(a, rQ[d / 16], sizeof a);
                                           } else {
                                             load_q<kHeadDim>(a, lane_q, d);
                                           }
                                         });
    const int n0 = n * kBlockN;
    ptx::cp_async_wait<1>();  // all but the next tile of K and V
    terms.apply(acc_s, lane_row + seq.shift - n0 - terms.lane_key);
    if (!kScarce && n > tiles.begin) copy_terms(n - 1);
    const bool edge = n >= tiles.full_end || n < tiles.full_begin;
    if (edge) terms.apply_mask(acc_s, mask, lane_row, n0);
    constexpr int kSlices = kShape.slices;
    constexpr int kSliceKeys = kBlockN / kSlices;
    const auto slice = [&](auto index) {
      constexpr int kFirst = decltype(index)::value * kSliceKeys;
      std::uint32_t rP[kRowTiles][kSliceKeys / 16][4];
      softmax.template first_probabilities<T, kFirst, kSliceKeys>(acc_s, scale_log2, rP, acc_o);
      multiply_pv<T, kHeadDim, kFirst, kSliceKeys>(acc_o, rP, lane_v + stage);
    };
    for_each_slice(slice, std::make_integer_sequence<int, kSlices>{});
    if (kScarce && n > tiles.begin) copy_terms(n - 1);
    stage = kStage - stage;
  }

  const tile::Work done = recall_work();
  write_results<kHeadDim, true, kOverlaid>(params, shape, tile::OutputRows<T>(params, done),
                                           tile::Rows<false>{shape}, done.head,
                                           done.m_block * kBlockM + warp_row, softmax, acc_o,
                                           smem + kMap.q + warp_row * kHeadDim * 2, lane_idx);
}

}  // namespace dlattn::wmma
