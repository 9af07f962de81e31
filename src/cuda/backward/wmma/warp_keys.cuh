#pragma once

#include <utility>

#include "cuda/backward/wmma/key_block.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/stages.cuh"

namespace dlattn::backward_wmma {

// A warp has 16 or 32 keys to itself, as the rows of accumulators: S^T = K Q^T, dP^T = V dO^T, P^T
// and dS^T = P^T (dP^T - delta) in registers, dV += P^T dO, dK += dS^T Q. Its rows of V stay in
// registers. dS of all warps goes to shared memory for dQ = dS K, where there is room for two steps
// side by side: every second step makes dQ of the two before. Barriers of the block beside fast
// tensor cores: one a step, behind which its Q and dO are in, as dS of the steps before is, and the
// other stages of Q and dO are free; and one more in every second step, behind which dS is. Beside
// slow ones mbarriers, so that warps need not be in step: "full" and "empty" of each stage, and for
// two steps' dS one by which all warps have written it and one by which all have read it.
template <typename T, int kHeadDim>
struct WarpKeys : KeyBlock<T, kHeadDim> {
  using Base = KeyBlock<T, kHeadDim>;
  using Base::base, Base::kBlockM, Base::kMap, Base::kRowBytes, Base::lane, Base::kRowTiles;
  using Base::params, Base::shape, Base::walk;
  using typename Base::Accumulators, typename Base::Operand, typename Base::Scores;
  static constexpr bool kMbarriers = !tile::kFastTensorCores;
  using Stages = tile::MbarrierStages<Base::kWarps, 2>;
  static_assert(kMbarrierBytes == ptx::kMbarrierBytes);

  Accumulators acc_dk = {}, acc_dv = {};
  std::uint32_t rV[kHeadDim / 16][kRowTiles][4];

  __device__ __forceinline__ WarpKeys(const BackwardParams& params, const Shape& shape,
                                      const typename Base::Walk& walk)
      : Base(params, shape, walk) {}

  __device__ __forceinline__ void run() {
    QueryStep step = walk.first(), before = {0, -1}, before_that = {0, -1};
    const AttentionParams& p = params.forward;
    if (kMbarriers && threadIdx.x == 0) {
      stages().init();
      ptx::mbarrier_init(ds_written(), Base::kWarps);
      ptx::mbarrier_init(ds_read(), Base::kWarps);
    }
    this->copy_keys(kMap.k, p.k, p.head_dim);
    this->copy_keys(kMap.v, p.v, p.head_dim_v);
    if (walk.any()) copy_queries(step, 0);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16)
      tile::mma::load_q<kHeadDim>(rV[d / 16], base + kMap.v + lane_offset(lane), d);
    if constexpr (kMbarriers) {
      stages().publish(0, true);
      __syncthreads();  // all warps have V
    }
    int stage = 0;
    unsigned i = 0;  // steps before
#pragma unroll 1
    for (bool more = walk.any(); more; stage ^= 1, ++i) {
      if constexpr (kMbarriers) {
        stages().wait_full(i);
      } else {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (const QueryStep next = walk.next(step); walk.exists(next))
          copy_queries(next, stage ^ 1);
        ptx::cp_async_commit();
      }
      const bool has_dq = shape.dq_sum && stage == 0 && before.m >= 0;
      if (has_dq) {
        if constexpr (kMbarriers) ptx::mbarrier_wait(ds_written(), parity_of_ds(i));
        this->add_dq(before_that, before, 0);
        if constexpr (kMbarriers) arrive(ds_read());
      }
      multiply(step, stage, i, has_dq);
      if constexpr (kMbarriers) stages().release(i, lane);
      before_that = before;
      before = step;
      step = walk.next(step);
      more = walk.exists(step);
      if (shape.slope_parts && step.group_head != before.group_head) this->store_slope_part(before);
    }
    if (shape.dq_sum && before.m >= 0) {
      __syncthreads();
      if (stage == 0) {
        this->add_dq(before_that, before, 0);
      } else {
        this->add_dq(before, {0, -1}, 0);
      }
    }
    this->store(params.dk, p.head_dim, shape.softmax_scale, acc_dk);
    this->store(params.dv, p.head_dim_v, 1.0f, acc_dv);
  }

 private:
  // From a tile's first row of keys to what this lane reads of the warp's.
  __device__ __forceinline__ int lane_offset(int lane) const {
    return this->group() * 16 * kRowTiles * kRowBytes + tile::mma::lane_offset_down<kHeadDim>(lane);
  }
  __device__ __forceinline__ void copy_queries(const QueryStep& step, int stage) {
    this->begin_head(step);
    this->copy_q(step, stage);
    this->copy_dout(step, stage);
  }

  // The same with mbarriers, once all warps have done with the step before, i - 1.
  __device__ __forceinline__ void copy_ahead(const QueryStep& step, int stage, unsigned i) {
    const QueryStep next = walk.next(step);
    if (!walk.exists(next)) return;
    if (i > 0) stages().wait_empty(i - 1);
    copy_queries(next, stage ^ 1);
    stages().publish(i + 1, true);
  }

  __device__ __forceinline__ Stages stages() const { return {base + kMap.mbarriers}; }
  __device__ __forceinline__ ptx::SmemAddress ds_written() const {
    return base + kMap.mbarriers + 4 * kMbarrierBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress ds_read() const {
    return base + kMap.mbarriers + 5 * kMbarrierBytes;
  }
  // For step i, an even one, of the two before.
  __device__ __forceinline__ static int parity_of_ds(unsigned i) { return (i / 2 + 1) % 2; }
  __device__ __forceinline__ void arrive(ptx::SmemAddress mbarrier) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(mbarrier);
  }

  __device__ __forceinline__ void multiply(const QueryStep& step, int stage, unsigned i,
                                           bool has_dq) {
    const ptx::SmemAddress q = this->q(stage), dout = this->dout(stage);
    const int lane = this->again(this->lane);
    const int across = tile::mma::lane_offset_across<kHeadDim>(lane);
    const int down = tile::mma::lane_offset_down<kHeadDim>(lane);
    const ptx::SmemAddress keys = base + kMap.k + lane_offset(lane);
    Scores p, ds;
    // S^T = K Q^T
    tile::mma::multiply_qk<T, kHeadDim, 0, kBlockM>(
        p, q + across,
        [&](std::uint32_t (&a)[kRowTiles][4], int d) { tile::mma::load_q<kHeadDim>(a, keys, d); });
    // dP^T = V dO^T, and with it P and dS, 16 queries at a time
    Operand rP, rDs;
    const bool plain = this->is_plain(step);
    this->for_each_sixteen(std::make_integer_sequence<int, kBlockM / 16>(), [&](auto sixteen) {
      constexpr int kFirst = 16 * decltype(sixteen)::value;
      tile::mma::multiply_qk<T, kHeadDim, kFirst, 16>(
          ds, dout + across,
          [&](std::uint32_t (&a)[kRowTiles][4], int d) { memcpy(a, rV[d / 16], sizeof a); });
      this->template gradients<kFirst / 8, 2>(step, plain, stage, p, ds, rP, rDs);
    });
    if constexpr (kMbarriers) {
      copy_ahead(step, stage, i);
      if (has_dq) ptx::mbarrier_wait(ds_read(), parity_of_ds(i));
    } else {
      if (has_dq) __syncthreads();  // all warps have read dS
    }
    if (shape.dq_sum) {
      this->leave(kMap.ds, rDs, stage);
      if (kMbarriers && stage == 1) arrive(ds_written());
    }
    // dV += P^T dO
    tile::mma::multiply_pv<T, kHeadDim, 0, kBlockM>(acc_dv, rP, dout + down);
    // dK += dS^T Q
    tile::mma::multiply_pv<T, kHeadDim, 0, kBlockM>(acc_dk, rDs, q + down);
  }
};

}  // namespace dlattn::backward_wmma
