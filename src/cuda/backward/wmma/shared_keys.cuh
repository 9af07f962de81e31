#pragma once

#include "cuda/backward/wmma/key_block.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/stages.cuh"

namespace dlattn::backward_wmma {

// Two warps share 16 keys, as the rows of accumulators. Each computes S^T = K Q^T, dP^T = V dO^T,
// P^T and dS^T = P^T (dP^T - delta) for half of a step's queries, and leaves P and dS in shared
// memory; then dV += P^T dO and dK += dS^T Q for all of them, half of the columns each. Three
// quarters of its rows of V stay in registers. Barriers of the block beside fast tensor cores,
// three a step: Q and dO are in; P and dS are; dO may be overwritten. Beside slow ones mbarriers,
// so that warps need not be in step, and a barrier of the two that share keys where P and dS are
// in.
template <typename T, int kHeadDim>
struct SharedKeys : KeyBlock<T, kHeadDim> {
  using Base = KeyBlock<T, kHeadDim>;
  using Base::base, Base::kBlockM, Base::kMap, Base::kOwnColumns, Base::kOwnQueries,
      Base::kRowBytes, Base::lane;
  using Base::params, Base::shape, Base::walk;
  using typename Base::Accumulators, typename Base::Operand, typename Base::Scores;

  static constexpr bool kMbarriers = !tile::kFastTensorCores;
  // mbarriers: Q and dO of a step are in; all warps have read dO; have left dS; have read that.
  enum Mbarrier : int { kFull, kDoutRead, kDsWritten, kDsRead };
  static_assert(kMbarrierBytes == ptx::kMbarrierBytes);

  Accumulators acc_dk = {}, acc_dv = {};
  static constexpr int kRest = v_rest_columns(kHeadDim), kHeld = kHeadDim - kRest;  // columns of V
  std::uint32_t rV[kHeld / 16][1][4];

  __device__ __forceinline__ SharedKeys(const BackwardParams& params, const Shape& shape,
                                        const typename Base::Walk& walk)
      : Base(params, shape, walk) {}

  __device__ __forceinline__ void run() {
    QueryStep step = walk.first();
    const AttentionParams& p = params.forward;
    this->copy_keys(kMap.k, p.k, p.head_dim);
    this->copy_keys(kMap.v, p.v, p.head_dim_v);
    copy_rest_of_v();
    if (kMbarriers && threadIdx.x == 0) init_mbarriers();
    if (walk.any()) {
      this->begin_head(step);
      this->copy_q(step, 0);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kHeld; d += 16)
      tile::mma::load_q<kHeadDim>(rV[d / 16], base + kMap.v + lane_offset(lane), d);
    __syncthreads();  // all warps have V
    if (walk.any()) this->copy_dout(step, 0);
    if constexpr (kMbarriers) {
      ptx::mbarrier_arrive_after_copies(mbarrier(kFull));
    } else {
      ptx::cp_async_commit();
    }
    int stage = 0;
    unsigned i = 0;  // steps before
#pragma unroll 1
    for (bool more = walk.any(); more; stage ^= 1, ++i) {
      if constexpr (kMbarriers) {
        wait(kFull, i);
      } else {
        ptx::cp_async_wait<0>();
        __syncthreads();
        copy_next_q(step, stage);
        ptx::cp_async_commit();
      }
      make_gradients(step, stage, i);
      if constexpr (kMbarriers) {
        ptx::barrier_sync(1 + this->group(), 32 * Base::kSharers);
        arrive(kDsWritten);
      } else {
        __syncthreads();
      }
      // dV += P^T dO
      multiply(acc_dv, kMap.p, this->dout(0));
      if constexpr (kMbarriers) {
        arrive(kDoutRead);
      } else {
        __syncthreads();
      }
      const QueryStep before = step;
      step = walk.next(step);
      more = walk.exists(step);
      if constexpr (!kMbarriers) {
        if (more) this->copy_dout(step, 0);
        ptx::cp_async_commit();
      }
      // dK += dS^T Q
      multiply(acc_dk, kMap.ds, this->q(stage));
      if (kMbarriers && more) {
        wait(kDoutRead, i);
        this->copy_dout(step, 0);
        ptx::mbarrier_arrive_after_copies(mbarrier(kFull));
      }
      if (shape.dq_sum) {
        if constexpr (kMbarriers) wait(kDsWritten, i);
        this->add_dq(before, before, 0);
      }
      if constexpr (kMbarriers) arrive(kDsRead);
      if (shape.slope_parts && step.group_head != before.group_head) this->store_slope_part(before);
    }
    this->store(params.dk, p.head_dim, shape.softmax_scale, acc_dk);
    this->store(params.dv, p.head_dim_v, 1.0f, acc_dv);
  }

 private:
  using Rows = typename Base::Rows;
  using DsRows = typename Base::DsRows;

  // From a tile's first row of keys to what this lane reads of the warp's.
  __device__ __forceinline__ int lane_offset(int lane) const {
    return this->group() * 16 * kRowBytes + tile::mma::lane_offset_down<kHeadDim>(lane);
  }

  __device__ __forceinline__ void copy_next_q(const QueryStep& step, int stage) {
    const QueryStep next = walk.next(step);
    if (!walk.exists(next)) return;
    this->begin_head(next);
    this->copy_q(next, stage ^ 1);
  }

  __device__ __forceinline__ ptx::SmemAddress mbarrier(Mbarrier which) const {
    return base + kMap.mbarriers + which * kMbarrierBytes;
  }
  __device__ __forceinline__ void init_mbarriers() const {
    ptx::mbarrier_init(mbarrier(kFull), Base::kThreads);
    for (const Mbarrier which : {kDoutRead, kDsWritten, kDsRead})
      ptx::mbarrier_init(mbarrier(which), Base::kWarps);
  }
  // For all of step i.
  __device__ __forceinline__ void wait(Mbarrier which, unsigned i) const {
    ptx::mbarrier_wait(mbarrier(which), i % 2);
  }
  __device__ __forceinline__ void arrive(Mbarrier which) const {
    __syncwarp();
    if (this->again(lane) == 0) ptx::mbarrier_arrive(mbarrier(which));
  }

  __device__ __forceinline__ void copy_rest_of_v() const {
    const TensorView& v = params.forward.v;
    const SequenceOf& seq = walk.seq;
    tile::copy_swizzled_rows<Base::kBlockN, kRest, Base::kThreads>(
        base + kMap.v_rest,
        seq.template rows<const T>(v, seq.start_k, walk.head_kv) + walk.n0 * v.row_stride + kHeld,
        v.row_stride, seq.seqlen_k - walk.n0, static_cast<int>(params.forward.head_dim_v) - kHeld);
  }

  // P and dS of the warp's queries, left in shared memory.
  __device__ __forceinline__ void make_gradients(const QueryStep& step, int stage, unsigned i) {
    const int lane = this->again(this->lane);
    const int own =
        this->part() * kOwnQueries * kRowBytes + tile::mma::lane_offset_across<kHeadDim>(lane);
    const ptx::SmemAddress keys = base + kMap.k + lane_offset(lane);
    const ptx::SmemAddress rest_of_v = base + kMap.v_rest +
                                       this->group() * 16 * kRest * kElementBytes +
                                       tile::mma::lane_offset_down<kRest>(lane);
    Scores p, ds;
    // S^T = K Q^T
    tile::mma::multiply_qk<T, kHeadDim, 0, kOwnQueries>(
        p, this->q(stage) + own,
        [&](std::uint32_t (&a)[1][4], int d) { tile::mma::load_q<kHeadDim>(a, keys, d); });
    // dP^T = V dO^T
    tile::mma::multiply_qk<T, kHeadDim, 0, kOwnQueries>(
        ds, this->dout(0) + own, [&](std::uint32_t (&a)[1][4], int d) {
          if (d < kHeld) {
            memcpy(a, rV[d / 16], sizeof a);
          } else {
            tile::mma::load_q<kRest>(a, rest_of_v, d - kHeld);
          }
        });
    Operand rP, rDs;
    this->template gradients<0, Base::kGroups>(step, this->is_plain(step), stage, p, ds, rP, rDs);
    if constexpr (kMbarriers) {
      // All warps have done with the step before: with its dS, and Q.
      if (i > 0) wait(kDsRead, i - 1);
      copy_next_q(step, stage);
    }
    this->leave(kMap.p, rP);
    this->leave(kMap.ds, rDs);
  }

  // Adds to the warp's columns of a gradient: P^T or dS^T, at byte `from`, times the queries' rows.
  __device__ __forceinline__ void multiply(Accumulators& acc, int from,
                                           ptx::SmemAddress queries) const {
    const int lane = this->again(this->lane);
    const ptx::SmemAddress scores = base + from + this->group() * 16 * DsRows::kRowBytes +
                                    tile::mma::lane_offset_down<kBlockM>(lane);
    const ptx::SmemAddress rows = Rows::block(queries + tile::mma::lane_offset_down<kHeadDim>(lane),
                                              0, this->part() * kOwnColumns);
#pragma unroll
    for (int m = 0; m < kBlockM; m += 16) {
      std::uint32_t a[1][4];
      tile::mma::load_q<kBlockM>(a, scores, m);
#pragma unroll
      for (int d = 0; d < kOwnColumns; d += 16) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, Rows::block(rows, m, d));
        ptx::mma_m16n8k16<T>(acc[0][d / 8], a[0], b[0], b[1]);
        ptx::mma_m16n8k16<T>(acc[0][d / 8 + 1], a[0], b[2], b[3]);
      }
    }
  }
};

}  // namespace dlattn::backward_wmma
