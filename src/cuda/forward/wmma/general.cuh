#pragma once

// The kernel for all that the fast shapes leave out: softcap, ALiBi, bias and mask with any
// strides, rows of any alignment, head dims of any size.
//
// A block's work tile and its warps' rows are those of kernel.cuh, and tiles of keys are walked as
// there, in one body for edge tiles and others. A lane's part of bias and mask starts on its way to
// shared memory a tile ahead. Up to head_dim 128 the row max is raised to that of a tile's scores
// before their probabilities. Above, where stages are handed over by mbarriers, it is raised from
// the sums of these, and the next tile is copied when this one's scores are no longer needed: a
// tile may be done again until then.
// K and V lie in shared memory in the order of RowsByLane, so that the accumulators of a lane hold
// neighbouring keys, of which bias and mask come by wide copies. Shared memory (SmemMap, bias and
// mask behind it) and barriers are those of kernel.cuh.
// Unlike there, no consumer struct holds the steps: with one, the kernel took up to 5% longer on an
// H200 at head_dim 64 and 128 (research/LOG.md).

#include "cuda/forward/wmma/accumulator_flush.cuh"
#include "cuda/forward/wmma/copy.cuh"
#include "cuda/forward/wmma/output.cuh"
#include "cuda/forward/wmma/score.cuh"
#include "cuda/forward/wmma/stages.cuh"
#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/forward/wmma/traits.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/mma/products.cuh"
#include "cuda/tile/mma/softmax.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"

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
  constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  constexpr int kStage = kBlockN * kRowBytes;  // bytes
  constexpr bool kQueryInRegisters = kShape.query_location != QueryLocation::kSmem;
  constexpr bool kOverlaid = kShape.query_location == QueryLocation::kRegistersOverlaid;
  constexpr bool kScarce = registers_are_scarce(kHeadDim);
  constexpr bool kFromSums = kShape.handover == Handover::kMbarrier;
  using LaneScoreMod = wmma::LaneScoreMod<T, kRowTiles, kBlockN, kNumThreads, kScarce>;

  const tile::WorkTile work = tile::scheduled_tile(shape, blockIdx.x);
  ptx::wait_for_grids_ahead();
  const tile::Sequence<T> seq(params, shape, work);
  const int m0 = work.m_block * kBlockM;
  if (m0 >= seq.seqlen_q) return;

  const int lane_idx = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * kRowTiles * 16;  // first row of this warp in the tile
  const int head_dim = static_cast<int>(params.head_dim);
  const int head_dim_v = static_cast<int>(params.head_dim_v);
  unsigned char* smem = ptx::dynamic_smem();
  const ptx::SmemAddress lane_q = ptx::smem_address(smem) + kMap.q + warp_row * kRowBytes +
                                  tile::mma::lane_offset_down<kHeadDim>(lane_idx);
  const ptx::SmemAddress lane_k =
      ptx::smem_address(smem) + kMap.k + tile::mma::lane_offset_across<kHeadDim>(lane_idx);
  const ptx::SmemAddress lane_v =
      ptx::smem_address(smem) + kMap.v + tile::mma::lane_offset_down<kHeadDim>(lane_idx);

  const TileRange tiles(tile::Mask(shape, seq.shift, seq.seqlen_k), m0,
                        min(m0 + kBlockM, seq.seqlen_q) - 1, kBlockN);
  const int lane_row = m0 + warp_row + lane_idx / 4;  // its first
  const LaneScoreMod score_mod(params, shape, work, lane_row, seq.seqlen_q, lane_idx,
                               smem + kMap.total);
  // Where the lane's rows of bias and mask begin, which a tile needs once, is in shared memory
  // where there are no registers for it.
  using BiasMaskRows = typename LaneScoreMod::Rows;
  BiasMaskRows* parked = reinterpret_cast<BiasMaskRows*>(smem + kMap.parked) + threadIdx.x;
  if constexpr (kScarce) *parked = score_mod.rows;
  const int position = lane_row + seq.shift - score_mod.lane_key;  // of its first row from key 0
  const float scale_log2 = score_mod.scale_log2();

  const Stages<kShape.num_warps, kShape.handover, 2> stages(ptx::smem_address(smem) +
                                                            kMap.mbarriers);
  tile::mma::SpeculativeSoftmax<kRowTiles> softmax;
  float acc_o[kRowTiles][kHeadDim / 8][4] = {};
  std::uint32_t rQ[kHeadDim / 16][kRowTiles][4];  // unless Q is read from shared memory

  using KeyCopy = TileCopy<T, kHeadDim, kNumThreads, false, RowsByLane>;
  const T* next_k = nullptr;  // where the copy of the next tile begins, of rows aligned to 16 bytes
  const T* next_v = nullptr;
  // Numbers that are seldom needed are computed again rather than kept: registers are scarce.
  const auto recall_work = [&] { return tile::scheduled_tile(shape, ptx::reread_block_index()); };
  const auto recall_sequence = [&] { return tile::Sequence<T>(params, shape, recall_work()); };
  const auto recall_row = [&] {  // this lane's first
    if constexpr (!kScarce) return lane_row;
    const int thread = static_cast<int>(ptx::reread_thread_index());
    return recall_work().m_block * kBlockM + thread / 32 * kRowTiles * 16 + thread % 32 / 4;
  };
  // Tile n, the i-th of the walk. The last is the only one that may be ragged.
  const auto copy_tile = [&](int n, int i, int stage, bool last) {
    unsigned char* sK = smem + kMap.k + stage;
    unsigned char* sV = smem + kMap.v + stage;
    if (!last && shape.copy_bytes == 16) {
      KeyCopy::template full_tile<kBlockN>(ptx::smem_address(sK), next_k, params.k.row_stride,
                                           head_dim);
      KeyCopy::template full_tile<kBlockN>(ptx::smem_address(sV), next_v, params.v.row_stride,
                                           head_dim_v);
    } else {
      const tile::Sequence<T> same = recall_sequence();
      const std::int64_t n0 = n * kBlockN;
      const int keys = same.seqlen_k - static_cast<int>(n0);
      copy_any_rows<KeyCopy, kBlockN>(sK, same.keys.k.row(n0), same.keys.k.stride, keys, head_dim,
                                      shape.copy_bytes);
      copy_any_rows<KeyCopy, kBlockN>(sV, same.keys.v.row(n0), same.keys.v.stride, keys, head_dim_v,
                                      shape.copy_bytes);
    }
    stages.publish(i, shape.copy_bytes >= 4);
  };
  const auto copy_bias_mask = [&](int n) {
    score_mod.copy(kScarce ? *parked : score_mod.rows, n * kBlockN, seq.seqlen_k,
                   n == tiles.end - 1);
    ptx::cp_async_commit();
  };
  if (tiles.begin < tiles.end) {
    copy_any_rows<TileCopy<T, kHeadDim, kNumThreads>, kBlockM>(
        smem + kMap.q, seq.q + m0 * params.q.row_stride, params.q.row_stride, seq.seqlen_q - m0,
        head_dim, shape.copy_bytes);
    if constexpr (!kOverlaid) copy_tile(tiles.end - 1, 0, 0, true);
    if constexpr (kQueryInRegisters) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 16) tile::mma::load_q<kHeadDim>(rQ[d / 16], lane_q, d);
    }
    if constexpr (kOverlaid) {
      __syncthreads();  // all warps have Q: K and V may overwrite it
      copy_tile(tiles.end - 1, 0, 0, true);
    }
    copy_bias_mask(tiles.end - 1);
    const int n0 = (tiles.end - 2) * kBlockN;
    next_k = KeyCopy::template last_row<kBlockN>(seq.keys.k, n0);
    next_v = KeyCopy::template last_row<kBlockN>(seq.keys.v, n0);
  }

  int stage = 0;  // in bytes
  int i = 0;      // how many tiles have been walked
  // Whether a tile's scores must be recomputed, and the row maxima raised to theirs first: the
  // speculative max overflowed by more than fp32 holds, or at all while is_flushed.
  bool lost = false;
  // Whether the accumulators of rows of many keys are set aside (tile/accumulator_flush.cuh). They
  // are taken back before the row max is raised.
  bool is_flushed = false;
#pragma unroll 1
  for (int n = tiles.end - 1;;) {
    const bool done = n < tiles.begin;
    const int n0 = n * kBlockN;
    const bool edge = n >= tiles.full_end || n < tiles.full_begin;
    const bool raises = edge || lost || softmax.unscaled;
    constexpr int kFlushTiles = tile::flush_tiles(kBlockN);
    if (__builtin_expect(i >= kFlushTiles, 0)) {
      const tile::WorkTile same = recall_work();
      const int thread = static_cast<int>(ptx::reread_thread_index());
      const AccumulatorFlush<T> flush{params, tile::ResultRows<T>(params, same),
                                      same.m_block * kBlockM + thread / 32 * kRowTiles * 16,
                                      thread % 32};
      if (is_flushed && (done || raises || i % kFlushTiles == 0)) {
        flush.restore(acc_o);
        is_flushed = false;
      }
      const bool pairs = shape.store_bytes >= 4 && head_dim_v % 2 == 0;  // as the plan asks
      if (!is_flushed && !done && !raises && pairs) {
        flush.store(acc_o);
        is_flushed = true;
      }
    }
    if (done) break;
    const auto copy_next_tile = [&] {
      if (n > tiles.begin) {
        if (i > 0) stages.wait_empty(i - 1);
        copy_tile(n - 1, i + 1, kStage - stage, false);
      } else {
        stages.skip();
      }
    };
    float acc_s[kRowTiles][kBlockN / 8][4];
    const auto make_scores = [&] {
      tile::mma::multiply_qk<T, kHeadDim, 0, kBlockN>(acc_s, lane_k + stage,
                                                      [&](std::uint32_t (&a)[kRowTiles][4], int d) {
                                                        if constexpr (kQueryInRegisters) {
                                                          memcpy(a, rQ[d / 16], sizeof a);
                                                        } else {
                                                          tile::mma::load_q<kHeadDim>(a, lane_q, d);
                                                        }
                                                      });
      ptx::cp_async_wait<stages.kGroups>();  // for bias and mask, not for the next K and V
      score_mod.apply(acc_s, position - n0);
    };
    const auto mask_scores = [&] {
      if (!edge) return;
      const tile::Sequence<T> same = recall_sequence();
      const int row = recall_row();
      score_mod.apply_mask(acc_s, tile::Mask(shape, same.shift, same.seqlen_k), row, n0);
    };
    // seed: wait-tile
    if (!lost) stages.template wait_full<1>(i);  // not for bias and mask
    if constexpr (kFromSums) {
      // seed: mask-scores
      make_scores();
      mask_scores();
      if (raises) {
        softmax.template raise_maxima<0, kBlockN>(acc_s, scale_log2,
                                                  score_mod.may_hide_tiny_scores(), acc_o);
        softmax.raised_probabilities(acc_s, scale_log2);
      }
      lost =
          !raises && !softmax.template speculate<0, kBlockN>(acc_s, scale_log2, acc_o, is_flushed);
      // seed: lost-scores
      if (lost) continue;  // the same tile again
      copy_next_tile();
      if (n > tiles.begin) copy_bias_mask(n - 1);
      std::uint32_t rP[kRowTiles][kBlockN / 16][4];
      softmax.template pack<T, 0, kBlockN>(acc_s, rP);
      tile::mma::multiply_pv<T, kHeadDim, 0, kBlockN>(acc_o, rP, lane_v + stage);
    } else {
      if (!lost) copy_next_tile();
      make_scores();
      // seed: would-raise
      lost = is_flushed && softmax.would_raise(acc_s, scale_log2, score_mod.may_hide_tiny_scores());
      if (lost) continue;  // the same tile again
      if (n > tiles.begin) copy_bias_mask(n - 1);
      mask_scores();
      constexpr int kSliceKeys = kBlockN / kShape.slices;
      const auto slice = [&](auto index) {
        constexpr int kFirst = decltype(index)::value * kSliceKeys;
        std::uint32_t rP[kRowTiles][kSliceKeys / 16][4];
        softmax.template first_probabilities<T, kFirst, kSliceKeys>(
            acc_s, scale_log2, score_mod.may_hide_tiny_scores(), rP, acc_o);
        tile::mma::multiply_pv<T, kHeadDim, kFirst, kSliceKeys>(acc_o, rP, lane_v + stage);
      };
      for_each_slice(slice, std::make_integer_sequence<int, kShape.slices>{});
    }
    stages.release(i, ptx::reread_thread_index() % 32);
    stage = kStage - stage;
    --n;
    ++i;
  }

  const tile::WorkTile done = recall_work();
  write_results<kHeadDim, true, kOverlaid>(params, shape, tile::ResultRows<T>(params, done),
                                           tile::Rows<false>{shape},
                                           done.m_block * kBlockM + warp_row, softmax, scale_log2,
                                           acc_o, smem + kMap.q + warp_row * kRowBytes, lane_idx);
}

}  // namespace dlattn::wmma
