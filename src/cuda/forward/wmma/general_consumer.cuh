#pragma once

#include <utility>

#include "cuda/forward/wmma/aside.cuh"
#include "cuda/forward/wmma/general_producer.cuh"
#include "cuda/forward/wmma/output.cuh"
#include "cuda/forward/wmma/score.cuh"
#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/forward/wmma/warp_rows.cuh"
#include "cuda/tile/mask.cuh"

namespace dlattn::wmma {

// A warp's way through the block's work tile, with score modification, bias and mask.
template <typename T, int kHeadDim>
struct GeneralConsumer {
  using Producer = GeneralProducer<T, kHeadDim>;
  using WarpRows = wmma::WarpRows<T, kHeadDim, kGeneral>;
  static constexpr TileShape kShape = Producer::kShape;
  static constexpr SmemMap kMap = Producer::kMap;
  static constexpr int kRowTiles = kShape.row_tiles;
  static constexpr int kBlockM = Producer::kBlockM;
  static constexpr int kBlockN = Producer::kBlockN;
  static constexpr bool kOverlaid = kShape.query_place == QueryPlace::kRegistersOverlaid;
  static constexpr bool kScarce = registers_are_scarce(kHeadDim);
  // Whether row maxima are raised from the sums of probabilities, after these, rather than from the
  // scores.
  static constexpr bool kFromSums = kShape.handover == Handover::kMbarrier;
  using LaneScoreMod = wmma::LaneScoreMod<T, kRowTiles, kBlockN, Producer::kThreads, kScarce>;
  using Scores = float[kRowTiles][kBlockN / 8][4];

  const AttentionParams& params;
  const LaunchShape& shape;
  const tile::Sequence<T> seq;
  const int m0;
  const int lane_idx = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * WarpRows::kRows;  // the warp's first in the work tile
  const ptx::SmemAddress lane_k, lane_v;                    // for this lane's ldmatrix, in stage 0
  const TileRange tiles;
  const int lane_row;  // the lane's first
  const LaneScoreMod score_mod;
  const int position;  // of the lane's first row, from its first key of tile 0
  const float scale_log2;
  Producer producer;
  int n;          // the tile
  int stage = 0;  // its stage's offset in shared memory, in bytes
  int i = 0;      // how many tiles have been walked
  // Whether a tile's scores must be recomputed, and the row maxima raised to theirs first: the
  // speculative max overflowed by more than fp32 holds, or at all while is_aside.
  bool lost = false;
  // Whether the accumulators of rows of many keys are set aside (tile/aside.cuh). They are taken
  // back before the row max is raised.
  bool is_aside = false;

  __device__ __forceinline__ GeneralConsumer(const AttentionParams& params,
                                             const LaunchShape& shape, const tile::WorkTile& work,
                                             const tile::Sequence<T>& seq)
      : params(params),
        shape(shape),
        seq(seq),
        m0(work.m_block * kBlockM),
        lane_k(ptx::smem_address(ptx::dynamic_smem()) + kMap.k +
               lane_place_across<kHeadDim>(lane_idx)),
        lane_v(ptx::smem_address(ptx::dynamic_smem()) + kMap.v +
               lane_place_down<kHeadDim>(lane_idx)),
        tiles(tile::Mask(shape, seq.shift, seq.seqlen_k), m0, min(m0 + kBlockM, seq.seqlen_q) - 1,
              kBlockN),
        lane_row(m0 + warp_row + lane_idx / 4),
        score_mod(params, shape, work, lane_row, seq.seqlen_q, lane_idx,
                  ptx::dynamic_smem() + kMap.total),
        position(lane_row + seq.shift - score_mod.lane_key),
        scale_log2(score_mod.scale_log2()),
        producer(params, shape),
        n(tiles.end - 1) {
    if constexpr (kScarce) *parked() = score_mod.rows;
  }

  __device__ __forceinline__ void run(WarpRows& rows) {
    if (tiles.begin < tiles.end) begin(rows);
#pragma unroll 1
    for (;;) {
      const bool done = n < tiles.begin;
      const bool edge = n >= tiles.full_end || n < tiles.full_begin;
      const bool raises = edge || lost || rows.softmax.unscaled;
      move_aside(rows, done, raises);
      if (done) break;
      step(rows, edge, raises);
    }
    end(rows);
  }

 private:
  // Q, the last tile of K and V, its bias and mask, and where the other tiles are.
  __device__ __forceinline__ void begin(WarpRows& rows) {
    producer.copy_queries(seq, m0);
    if constexpr (!kOverlaid) producer.copy_tile(n, 0, 0, true);
    if constexpr (WarpRows::kInRegisters) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
      rows.load_queries();
    }
    if constexpr (kOverlaid) {
      __syncthreads();  // all warps have Q: K and V may overwrite it
      producer.copy_tile(n, 0, 0, true);
    }
    copy_bias_mask(n);
    producer.set_next(seq, tiles);
  }

  // Tile n: S = Q K^T, score modification, bias and mask, P = exp(S - row max), O += P V. Goes on
  // to the next tile, or sets `lost` and leaves the rows as they are. `raises`: whether row maxima
  // are raised to those of the scores.
  __device__ __forceinline__ void step(WarpRows& rows, bool edge, bool raises) {
    if (!lost) producer.stages.template wait_full<1>(i);  // not for bias and mask
    Scores acc_s;
    if constexpr (kFromSums) {
      make_scores(rows, acc_s);
      mask_scores(acc_s, edge);
      if (raises) {
        rows.softmax.template raise_maxima<0, kBlockN>(acc_s, scale_log2, score_mod.faint(),
                                                       rows.acc_o);
        rows.softmax.raised_probabilities(acc_s, scale_log2);
      }
      lost = !raises &&
             !rows.softmax.template speculate<0, kBlockN>(acc_s, scale_log2, rows.acc_o, is_aside);
      if (lost) return;
      copy_next_tile();
      if (n > tiles.begin) copy_bias_mask(n - 1);
      std::uint32_t rP[kRowTiles][kBlockN / 16][4];
      rows.softmax.template pack<T, 0, kBlockN>(acc_s, rP);
      multiply_pv<T, kHeadDim, 0, kBlockN>(rows.acc_o, rP, lane_v + stage);
    } else {
      if (!lost) copy_next_tile();
      make_scores(rows, acc_s);
      lost = is_aside && rows.softmax.would_raise(acc_s, scale_log2, score_mod.faint());
      if (lost) return;
      if (n > tiles.begin) copy_bias_mask(n - 1);
      mask_scores(acc_s, edge);
      for_each_slice([&](auto index) { attend_slice<decltype(index)::value>(rows, acc_s); },
                     std::make_integer_sequence<int, kShape.slices>{});
    }
    producer.stages.release(i, ptx::reread_thread_index() % 32);
    stage = Producer::kStageBytes - stage;
    --n;
    ++i;
  }

  // P = exp(S - row max) and O += P V of a slice of the tile's keys, row maxima raised first.
  template <int kSlice>
  __device__ __forceinline__ void attend_slice(WarpRows& rows, Scores& acc_s) const {
    constexpr int kKeys = kBlockN / kShape.slices;
    constexpr int kFirst = kSlice * kKeys;
    std::uint32_t rP[kRowTiles][kKeys / 16][4];
    rows.softmax.template first_probabilities<T, kFirst, kKeys>(acc_s, scale_log2,
                                                                score_mod.faint(), rP, rows.acc_o);
    multiply_pv<T, kHeadDim, kFirst, kKeys>(rows.acc_o, rP, lane_v + stage);
  }

  // S = Q K^T, and the score modification and bias.
  __device__ __forceinline__ void make_scores(const WarpRows& rows, Scores& acc_s) const {
    rows.template multiply_keys<kBlockN>(acc_s, lane_k + stage);
    // For bias and mask, not for the next tile of K and V.
    ptx::cp_async_wait<decltype(producer.stages)::kGroups>();
    score_mod.apply(acc_s, lane_position() - n * kBlockN);
  }

  // The mask by position.
  __device__ __forceinline__ void mask_scores(Scores& acc_s, bool edge) const {
    if (!edge) return;
    const tile::Sequence<T> same = producer.sequence_again();
    const int row = row_again();
    score_mod.apply_mask(acc_s, tile::Mask(shape, same.shift, same.seqlen_k), row, n * kBlockN);
  }

  __device__ __forceinline__ void copy_next_tile() {
    if (n > tiles.begin) {
      if (i > 0) producer.stages.wait_empty(i - 1);
      producer.copy_tile(n - 1, i + 1, Producer::kStageBytes - stage, false);
    } else {
      producer.stages.skip();
    }
  }

  // This lane's part of a tile's bias and mask.
  __device__ __forceinline__ void copy_bias_mask(int tile) const {
    score_mod.copy(kScarce ? *parked() : score_mod.rows, tile * kBlockN, seq.seqlen_k,
                   tile == tiles.end - 1);
    ptx::cp_async_commit();
  }

  // Sets the accumulators aside every tile::kSpanKeys keys. Takes them back before they are set
  // aside again, before row maxima are raised, and at the end.
  __device__ __forceinline__ void move_aside(WarpRows& rows, bool done, bool raises) {
    constexpr int kSpan = tile::span_tiles(kBlockN);
    if (__builtin_expect(i >= kSpan, 0)) {
      const tile::WorkTile same = producer.work_again();
      const int thread = static_cast<int>(ptx::reread_thread_index());
      const Aside<T> aside{params, tile::ResultRows<T>(params, same),
                           same.m_block * kBlockM + thread / 32 * WarpRows::kRows, thread % 32};
      if (is_aside && (done || raises || i % kSpan == 0)) {
        aside.take(rows.acc_o);
        is_aside = false;
      }
      const bool pairs =
          shape.store_bytes >= 4 && producer.head_dim_v % 2 == 0;  // as the plan asks
      if (!is_aside && !done && !raises && pairs) {
        aside.set(rows.acc_o);
        is_aside = true;
      }
    }
  }

  // O = O / row sum, and the rows' lse.
  __device__ __forceinline__ void end(WarpRows& rows) const {
    const tile::WorkTile done = producer.work_again();
    write_results<kHeadDim, true, kOverlaid>(
        params, shape, tile::ResultRows<T>(params, done), tile::Rows<false>{shape},
        done.m_block * kBlockM + warp_row, rows.softmax, scale_log2, rows.acc_o,
        ptx::dynamic_smem() + kMap.q + threadIdx.x / 32 * WarpRows::kBytes, lane_idx);
  }

  // `position`. Before compute capability 9.0 it is the one register too many at head_dim 256, and
  // is worked out again; from there on that would take more of them.
  __device__ __forceinline__ int lane_position() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    if constexpr (kScarce) {
      const int thread = static_cast<int>(ptx::reread_thread_index());
      return m0 + thread / 32 * WarpRows::kRows + thread % 32 / 4 + seq.shift -
             thread % 4 * kRunKeys;
    }
#endif
    return position;
  }
  // Where the lane's rows of bias and mask begin, which a tile needs once, is in shared memory
  // where there are no registers for it.
  __device__ __forceinline__ typename LaneScoreMod::Rows* parked() const {
    return reinterpret_cast<typename LaneScoreMod::Rows*>(ptx::dynamic_smem() + kMap.parked) +
           threadIdx.x;
  }
  __device__ __forceinline__ int row_again() const {  // lane_row
    if constexpr (!kScarce) return lane_row;
    const int thread = static_cast<int>(ptx::reread_thread_index());
    return producer.work_again().m_block * kBlockM + thread / 32 * WarpRows::kRows +
           thread % 32 / 4;
  }
};

}  // namespace dlattn::wmma
