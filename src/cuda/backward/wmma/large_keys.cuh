#pragma once

#include "cuda/backward/wmma/key_block.cuh"

namespace dlattn::backward_wmma {

// As SharedKeys with 32 keys and larger steps, for GPUs that have the memory: P and dS of a step
// are made in the same step as the gradients of the one before, so that no barrier stands between a
// warp's exponentials and another's products. The queries' stages decide on barriers: with three
// there is one a step, behind which Q and dO of the step are in, as P and dS of the one before are,
// and the stage that is neither's is free. With two the copies wait for another one,
// behind which all warps have the gradients of the step before; then P and dS have one stage.
template <typename T, int kHeadDim>
struct LargeKeys : KeyBlock<T, kHeadDim, true> {
  using Base = KeyBlock<T, kHeadDim, true>;
  using Base::base, Base::kBlockM, Base::kMap, Base::kOwnColumns, Base::kOwnQueries,
      Base::kRowBytes, Base::lane, Base::kRowTiles;
  using Base::params, Base::shape, Base::walk;
  using typename Base::Accumulators, typename Base::Operand, typename Base::Scores;
  static constexpr int kStages = Base::kTile.stages;
  static constexpr bool kOneBarrier = kStages == 3;

  Accumulators acc_dk = {}, acc_dv = {};
  Operand rP, rDs;  // of the step before

  __device__ __forceinline__ LargeKeys(const BackwardParams& params, const Shape& shape,
                                       const typename Base::Walk& walk)
      : Base(params, shape, walk) {}

  __device__ __forceinline__ void run() {
    QueryStep step = walk.first(), before = {0, -1};
    const AttentionParams& p = params.forward;
    this->copy_keys(kMap.k, p.k, p.head_dim);
    this->copy_keys(kMap.v, p.v, p.head_dim_v);
    if (walk.any()) copy_queries(step, 0);
    ptx::cp_async_commit();
    int stage = 0, stage_before = 0, scores = 0;
#pragma unroll 1
    for (bool more = walk.any(); more;) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      const int next_stage = stage == kStages - 1 ? 0 : stage + 1;
      const QueryStep next = walk.next(step);
      if (kOneBarrier) copy_next(next, next_stage);
      if (before.m >= 0) multiply_gradients(before, stage_before, scores ^ 1);
      if (!kOneBarrier) {
        __syncthreads();
        copy_next(next, next_stage);
      }
      make_gradients(step, stage, scores);
      before = step, stage_before = stage;
      step = next, stage = next_stage;
      scores ^= 1;
      more = walk.exists(step);
      if (shape.slope_parts && step.group_head != before.group_head) this->store_slope_part(before);
    }
    ptx::cp_async_wait<0>();  // without steps K and V
    if (before.m >= 0) {
      __syncthreads();
      multiply_gradients(before, stage_before, scores ^ 1);
    }
    this->store(params.dk, p.head_dim, shape.softmax_scale, acc_dk);
    this->store(params.dv, p.head_dim_v, 1.0f, acc_dv);
  }

 private:
  using Rows = typename Base::Rows;
  using DsRows = typename Base::DsRows;

  // From a tile's first row of keys to what this lane reads of the warp's.
  __device__ __forceinline__ int lane_offset(int lane) const {
    return this->group() * 16 * kRowTiles * kRowBytes + tile::mma::lane_offset_down<kHeadDim>(lane);
  }
  __device__ __forceinline__ void copy_queries(const QueryStep& step, int stage) {
    this->begin_head(step);
    this->copy_q(step, stage);
    this->copy_dout(step, stage);
  }
  __device__ __forceinline__ void copy_next(const QueryStep& next, int stage) {
    if (walk.exists(next)) copy_queries(next, stage);
    ptx::cp_async_commit();
  }

  // P and dS of the warp's queries, kept as operands and left in shared memory.
  __device__ __forceinline__ void make_gradients(const QueryStep& step, int stage, int scores) {
    const int lane = this->again(this->lane);
    const int own =
        this->part() * kOwnQueries * kRowBytes + tile::mma::lane_offset_across<kHeadDim>(lane);
    const ptx::SmemAddress keys = base + kMap.k + lane_offset(lane);
    const ptx::SmemAddress values = keys + (kMap.v - kMap.k);
    Scores p, ds;
    // S^T = K Q^T
    tile::mma::multiply_qk<T, kHeadDim, 0, kOwnQueries>(
        p, this->q(stage) + own,
        [&](std::uint32_t (&a)[kRowTiles][4], int d) { tile::mma::load_q<kHeadDim>(a, keys, d); });
    // dP^T = V dO^T
    tile::mma::multiply_qk<T, kHeadDim, 0, kOwnQueries>(
        ds, this->dout(stage) + own, [&](std::uint32_t (&a)[kRowTiles][4], int d) {
          tile::mma::load_q<kHeadDim>(a, values, d);
        });
    const bool plain = this->is_plain(step);
    this->for_each_sixteen(std::make_integer_sequence<int, kOwnQueries / 16>(), [&](auto i) {
      constexpr int kFirst = 2 * decltype(i)::value;
      this->template gradients<kFirst, 2>(step, plain, stage, p, ds, rP, rDs);
      this->template leave<kFirst, 2>(kMap.p + scores * kMap.scores_stage, rP);
      this->template leave<kFirst, 2>(kMap.ds + scores * kMap.scores_stage, rDs);
    });
  }

  // Adds a step to the gradients, from its P and dS.
  __device__ __forceinline__ void multiply_gradients(const QueryStep& before, int stage,
                                                     int scores) {
    // dV += P^T dO
    multiply(acc_dv, rP, kMap.p + scores * kMap.scores_stage, this->dout(stage));
    // dK += dS^T Q
    multiply(acc_dk, rDs, kMap.ds + scores * kMap.scores_stage, this->q(stage));
    if (shape.dq_sum) this->add_dq(before, before, scores);
  }

  // Adds to the warp's columns of a gradient: P^T or dS^T times the queries' rows. Of the warp's
  // own queries it has the scores in registers, of others they are at byte `from`.
  __device__ __forceinline__ void multiply(Accumulators& acc, const Operand& own, int from,
                                           ptx::SmemAddress queries) const {
    const int lane = this->again(this->lane);
    const ptx::SmemAddress scores = base + from +
                                    this->group() * 16 * kRowTiles * DsRows::kRowBytes +
                                    tile::mma::lane_offset_down<kBlockM>(lane);
    const ptx::SmemAddress rows = Rows::block(queries + tile::mma::lane_offset_down<kHeadDim>(lane),
                                              0, this->part() * kOwnColumns);
#pragma unroll
    for (int other = 0; other < Base::kSharers; ++other) {
      const int part = (this->part() + other) % Base::kSharers;
      const ptx::SmemAddress of_rows = rows + part * kOwnQueries * kRowBytes;
      const ptx::SmemAddress of_scores = scores ^ (part * kOwnQueries * kElementBytes);
#pragma unroll
      for (int m = 0; m < kOwnQueries; m += 16) {
        std::uint32_t a[kRowTiles][4];
        if (other == 0) {
#pragma unroll
          for (int k = 0; k < kRowTiles; ++k) memcpy(a[k], own[k][m / 16], sizeof a[k]);
        } else {
          tile::mma::load_q<kBlockM>(a, of_scores, m);
        }
#pragma unroll
        for (int d = 0; d < kOwnColumns; d += 16) {
          std::uint32_t b[4];
          ptx::ldmatrix_x4_trans(b, Rows::block(of_rows, m, d));
#pragma unroll
          for (int k = 0; k < kRowTiles; ++k) {
            ptx::mma_m16n8k16<T>(acc[k][d / 8], a[k], b[0], b[1]);
            ptx::mma_m16n8k16<T>(acc[k][d / 8 + 1], a[k], b[2], b[3]);
          }
        }
      }
    }
  }
};

}  // namespace dlattn::backward_wmma
