#pragma once

#include <cstring>

#include "cuda/forward/wmma/merge.cuh"
#include "cuda/forward/wmma/split_producer.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/mma/mask.cuh"
#include "cuda/tile/mma/products.cuh"
#include "cuda/tile/mma/softmax.cuh"

namespace dlattn::wmma {

// 16 query rows in one group's warp: its share of the output, of the group's keys alone. Apart from
// the consumer as WarpRows is.
template <int kHeadDim, int kBlockN>
struct SplitRows {
  using Scores = float[1][kBlockN / 8][4];

  tile::mma::SpeculativeSoftmax<1> softmax;
  float acc_o[1][kHeadDim / 8][4] = {};
  std::uint32_t rQ[kHeadDim / 16][1][4];
  std::uint32_t rP[1][kBlockN / 16][4];
};

// A warp's way through its group's tiles. Probabilities of a tile are made beside the product of Q
// with K of the next one.
template <typename T, int kHeadDim, int kVariant>
struct SplitConsumer {
  using Producer = SplitProducer<T, kHeadDim, kVariant>;
  static constexpr SplitShape kShape = Producer::kShape;
  static constexpr SplitSmemMap kMap = Producer::kMap;
  static constexpr int kBlockM = Producer::kBlockM;
  static constexpr int kBlockN = Producer::kBlockN;
  static constexpr int kStages = Producer::kStages;
  static constexpr int kGroups = kShape.key_groups;
  static constexpr bool kBranches = kHeadDim <= 64 && !kShape.single_pass;  // registers are scarce
  static_assert(kBlockM == kShape.row_groups * 16, "a warp has 16 rows");
  using Rows = SplitRows<kHeadDim, kBlockN>;
  using Scores = typename Rows::Scores;

  const SplitParams& params;
  const int group = threadIdx.x / Producer::kGroupThreads;
  const int row_group = threadIdx.x / 32 % kShape.row_groups;
  const int lane_idx = threadIdx.x % 32;
  const int warp_row = row_group * 16;
  const tile::WorkTile work;
  const SplitSequence seq;
  const int m0;
  const tile::Mask mask;
  const Producer producer;

  __device__ __forceinline__ SplitConsumer(const SplitParams& params, const tile::WorkTile& work,
                                           const SplitSequence& seq)
      : params(params),
        work(work),
        seq(seq),
        m0(work.m_block * kBlockM),
        mask(params, seq.shift, seq.seqlen_k),
        producer(params, seq, TileRange(mask, m0, min(m0 + kBlockM, seq.seqlen_q) - 1, kBlockN),
                 group) {}

  __device__ __forceinline__ void run(Rows& rows) const {
    producer.start(seq, m0);
    // Where the results go, worked out while the copies are on their way.
    const tile::ResultRows<T> result(params, work);
    load_queries(rows);
    const int count = producer.tiles.count;
    if (count > 0) {
      Scores acc_s;
      begin(rows, acc_s);
      int stage = producer.stage_of(0), free = producer.stage_of(-1);
#pragma unroll 1
      for (int i = 0; i < count - 1; ++i) {
        step(rows, acc_s, i, stage, free);
        if constexpr (kShape.single_pass) break;  // there are two tiles at most
        free = stage;
        stage = stage == 0 ? (kStages - 1) * Producer::kStageBytes : stage - Producer::kStageBytes;
      }
      make_probabilities(rows, acc_s);
    }
    end(rows);
    merge(result);
  }

 private:
  __device__ __forceinline__ void load_queries(Rows& rows) const {
    ptx::cp_async_wait<Producer::kFirstStages>();
    __syncthreads();
    const ptx::SmemAddress sQ = ptx::smem_address(ptx::dynamic_smem()) + kMap.q;
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      tile::mma::load_q<kHeadDim>(rows.rQ[d / 16],
                                  sQ + warp_row * kHeadDim * static_cast<int>(sizeof(T)) +
                                      tile::mma::lane_offset_down<kHeadDim>(lane_idx),
                                  d);
    }
  }

  // S of tile 0, and the row max of its scores.
  __device__ __forceinline__ void begin(Rows& rows, Scores& acc_s) const {
    multiply_k(rows, acc_s, producer.stage_of(-1));
    hide_unseen(acc_s, 0);
    rows.softmax.template set_maxima<0, kBlockN>(acc_s, params.scale_log2);
  }

  // P of tile i from its scores, O += P V of it; S of tile i + 1 = Q K^T, and the row max of those.
  __device__ __forceinline__ void step(Rows& rows, Scores& acc_s, int i, int stage,
                                       int free) const {
    ptx::cp_async_wait<Producer::kFirstStages - 1>();
    group_barrier();
    if constexpr (!kShape.single_pass) producer.start_stage(i + kStages - 1, free);
    make_probabilities(rows, acc_s);
    Scores next_s;
    multiply_k(rows, next_s, stage);
    multiply_v(rows, stage);
    hide_unseen(next_s, i + 1);
    rows.softmax.template raise_maxima<0, kBlockN>(next_s, params.scale_log2, false, rows.acc_o);
    memcpy(acc_s, next_s, sizeof acc_s);
  }

  // The last tile's O += P V. Leaves the group's part of the output in its stages, and its rows'
  // statistics behind those of all groups.
  __device__ __forceinline__ void end(Rows& rows) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const tile::OnlineSoftmax row = rows.softmax.scaled_row(0, h, params.scale_log2);
      if (lane_idx % 4 == 0) stats()[8 * h * kGroups + group] = {row.row_max, row.row_sum};
    }
    if (producer.tiles.count > 0) {
      ptx::cp_async_wait<0>();
      group_barrier();
      multiply_v(rows, 0);
    }
    rows.softmax.scale_rows(params.scale_log2, rows.acc_o);
    // Where a part reaches into the last stage, another warp of the group may still read V there.
    if (kPartOffset == 0) group_barrier();
    tile::mma::store_part<kHeadDim>(part(group), rows.acc_o[0], lane_idx);
    __syncthreads();
  }

  // O = the sum of the groups' parts, of 8 rows of the row group and a share of the columns.
  __device__ __forceinline__ void merge(const tile::ResultRows<T>& result) const {
    constexpr int kShares = kGroups / 2;  // of the columns
    constexpr int kPairs = tile::mma::kPartPairs<kHeadDim> / kShares;
    static_assert(tile::mma::kPartPairs<kHeadDim> % kShares == 0);
    const int h = group % 2, share = group / 2, column = share * kPairs * 16;
    const RowParts<kGroups, kPairs> parts(
        part(0) + h * tile::mma::kPartPairs<kHeadDim> + share * kPairs, kMap.group, lane_idx);
    const RowMerge<kGroups> merge(stats() + 8 * h * kGroups, result.sink);
    const int row = m0 + warp_row + 8 * h + lane_idx / 4;
    if (row >= result.seqlen_q) return;
    if (result.lse && share == 0 && lane_idx % 4 == 0)
      result.lse[row] = merge.finalize(result.sink).lse;
    parts.store(result.out + row * params.out.row_stride + column, merge,
                params.head_dim_v - column, params.store_bytes, lane_idx);
  }

  __device__ __forceinline__ void group_barrier() const {
    ptx::barrier_sync(1 + group, Producer::kGroupThreads);
  }
  // S = Q K^T
  __device__ __forceinline__ void multiply_k(const Rows& rows, Scores& acc_s, int stage) const {
    tile::mma::multiply_qk<T, kHeadDim, 0, kBlockN>(
        acc_s, producer.k(stage) + tile::mma::lane_offset_across<kHeadDim>(lane_idx),
        [&](std::uint32_t (&a)[1][4], int d) { memcpy(a, rows.rQ[d / 16], sizeof a); });
  }
  // O += P V
  __device__ __forceinline__ void multiply_v(Rows& rows, int stage) const {
    tile::mma::multiply_pv<T, kHeadDim, 0, kBlockN>(
        rows.acc_o, rows.rP, producer.v(stage) + tile::mma::lane_offset_down<kHeadDim>(lane_idx));
  }
  // P = exp(S - row max)
  __device__ __forceinline__ void make_probabilities(Rows& rows, Scores& acc_s) const {
    rows.softmax.template safe_probabilities<T, 0, kBlockN, kBranches>(acc_s, params.scale_log2,
                                                                       rows.rP);
  }
  // The mask, of tile i if it is an edge tile.
  __device__ __forceinline__ void hide_unseen(Scores& acc_s, int i) const {
    const int n0 = producer.tiles.tile(i) * kBlockN, row = m0 + warp_row;
    if (!tile::contains_all(mask.every_row(row, row + 15), n0, kBlockN))
      tile::mma::apply_mask(acc_s, mask, row + lane_idx / 4, n0, lane_idx);
  }

  // Statistics of this lane's first row, of all groups.
  __device__ __forceinline__ tile::mma::PartStats* stats() const {
    return reinterpret_cast<tile::mma::PartStats*>(ptx::dynamic_smem() + kMap.stats) +
           (warp_row + lane_idx / 4) * kGroups;
  }

  static constexpr int kPartBytes = kBlockM * kHeadDim * static_cast<int>(sizeof(float));
  // In a group's stages, behind the last tile's if there is room.
  static constexpr int kPartOffset =
      kPartBytes <= kMap.group - Producer::kStageBytes ? Producer::kStageBytes : 0;
  static_assert(kPartBytes <= kMap.group);

  // The row group's part of a group.
  __device__ __forceinline__ tile::mma::PartPair* part(int of_group) const {
    return reinterpret_cast<tile::mma::PartPair*>(ptx::dynamic_smem() + kMap.stages +
                                                  of_group * kMap.group + kPartOffset) +
           row_group * 2 * tile::mma::kPartPairs<kHeadDim>;
  }
};

}  // namespace dlattn::wmma
