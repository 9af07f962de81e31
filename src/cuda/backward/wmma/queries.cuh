#pragma once

// dQ by itself, without sums in global memory, so that its bits never change: a block of 8 warps
// owns block_m queries of one head and walks the keys that they see, block_n at a time. S and dP
// are computed again, with queries as rows of accumulators; dS, which never leaves registers, is
// operand a of dQ += dS K.
//
// A warp has 16 queries. With a head_dim tile of 256, for which shared memory holds 64 queries, two
// warps share them, divide a step's keys, and add up their parts of dQ at the end.
// Shared memory: QuerySmem, where K and V have one stage each: V of the next step is copied while
// this one's S and dQ are computed, which read K, and K while dP is, which reads V. Barriers: the
// block's twice a step, when V is in and K is free, and the other way round.

#include "cuda/backward/wmma/score.cuh"
#include "cuda/backward/wmma/store.cuh"
#include "cuda/backward/wmma/traits.h"
#include "cuda/plan/backward_workspace.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/tile/mma/mask.cuh"
#include "cuda/tile/mma/products.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/swizzled_copy.cuh"

namespace dlattn::backward_wmma {

template <typename T, int kHeadDim>
struct QueryBlock {
  static constexpr QueryTile kTile = query_tile(kHeadDim);
  static constexpr QuerySmem kMap = query_smem(kHeadDim);
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarpKeys = kBlockN / kTile.key_splits;
  static constexpr int kRowWarps = kNumWarps / kTile.key_splits;
  static constexpr int kRowBytes = kHeadDim * kElementBytes;
  static_assert(kRowWarps * 16 == kBlockM);
  using Scores = float[1][kWarpKeys / 8][4];

  const BackwardParams& params;
  const Shape& shape;
  const SequenceOf& seq;
  int batch, head, m0;
  unsigned char* smem;
  ptx::SmemAddress base;
  int lane, warp_row, split;
  float lse[2], delta[2];  // of the lane's rows, which need not exist
  float acc[1][kHeadDim / 8][4];

  __device__ __forceinline__ QueryBlock(const BackwardParams& params, const Shape& shape,
                                        const SequenceOf& seq, const tile::WorkTile& work)
      : params(params),
        shape(shape),
        seq(seq),
        batch(work.batch),
        head(work.head),
        m0(work.m_block * kBlockM),
        smem(ptx::dynamic_smem()) {
    base = ptx::smem_address(smem);
    lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    warp_row = warp % kRowWarps * 16;
    split = warp / kRowWarps;
    const std::int64_t row =
        padded_row_index(params.forward, batch, head, seq.start_q) + lane_row();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      lse[h] = shape.lse[row + 8 * h];
      delta[h] = shape.delta[row + 8 * h];
    }
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[0][j][e] = 0.0f;
    }
  }

  __device__ __forceinline__ int lane_row() const { return m0 + warp_row + lane / 4; }

  template <int kRows>
  __device__ __forceinline__ void copy(int at, const TensorView& x, int start, int of_head,
                                       int first, int end, std::int64_t columns) const {
    tile::copy_swizzled_rows<kRows, kHeadDim, kNumThreads>(
        base + at, seq.template rows<const T>(x, start, of_head) + first * x.row_stride,
        x.row_stride, end - first, static_cast<int>(columns));
  }
  __device__ __forceinline__ int head_kv() const {
    return static_cast<int>(shape.heads_per_kv_head.quotient(static_cast<unsigned>(head)));
  }
  __device__ __forceinline__ void copy_k(int n) const {
    const AttentionParams& p = params.forward;
    copy<kBlockN>(kMap.k, p.k, seq.start_k, head_kv(), n * kBlockN, seq.seqlen_k, p.head_dim);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void copy_v(int n) const {
    const AttentionParams& p = params.forward;
    copy<kBlockN>(kMap.v, p.v, seq.start_k, head_kv(), n * kBlockN, seq.seqlen_k, p.head_dim_v);
    ptx::cp_async_commit();
  }
  // Without a commit: those of V or K close the group.
  __device__ __forceinline__ void copy_q() const {
    const AttentionParams& p = params.forward;
    copy<kBlockM>(kMap.q, p.q, seq.start_q, head, m0, seq.seqlen_q, p.head_dim);
  }
  __device__ __forceinline__ void copy_dout() const {
    const AttentionParams& p = params.forward;
    const bool any = params.dout.data != nullptr;
    copy<kBlockM>(kMap.dout, any ? params.dout : p.q, seq.start_q, head, m0,
                  any ? seq.seqlen_q : m0, p.head_dim_v);
  }

  // X = A B^T for the warp's rows of a tile of queries and its keys of a tile of keys.
  __device__ __forceinline__ void multiply(Scores& x, int queries, int keys) const {
    const ptx::SmemAddress a =
        base + queries + warp_row * kRowBytes + tile::mma::lane_offset_down<kHeadDim>(lane);
    tile::mma::multiply_qk<T, kHeadDim, 0, kWarpKeys>(
        x,
        base + keys + split * kWarpKeys * kRowBytes + tile::mma::lane_offset_across<kHeadDim>(lane),
        [&](std::uint32_t (&rA)[1][4], int d) { tile::mma::load_q<kHeadDim>(rA, a, d); });
  }

  // Gradients of a step's scores in the place of S, from S and dP: of the products q.k where
  // kOfProducts, else of scores as the softmax takes them.
  template <bool kOfProducts = true>
  __device__ __forceinline__ void gradients(int n, Scores& s, Scores& dp) const {
    const int n0 = n * kBlockN + split * kWarpKeys;
#pragma unroll
    for (int j = 0; j < kWarpKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[0][j][e] -= delta[e / 2];
    }
    const auto visit = [&](auto use) {
#pragma unroll
      for (int j = 0; j < kWarpKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          use(s[0][j][e], lane_row() + e / 2 * 8, n0 + 8 * j + lane % 4 * 2 + e % 2);
      }
    };
    const ScoreMod<T> mod(params.forward, shape, seq, batch, head);
    mod.apply(visit, [&](int i, float factor) {
      if (kOfProducts) dp[0][i / 4][i % 4] *= factor;
    });
    const tile::Mask mask(shape, seq.shift, seq.seqlen_k);
    const int last = min(m0 + kBlockM, seq.seqlen_q) - 1;
    if (!tile::contains_all(mask.every_row(m0, last), n * kBlockN, kBlockN))
      tile::mma::apply_mask(s, mask, lane_row(), n0, lane);
    if (shape.natural_lse) {
#pragma unroll
      for (int j = 0; j < kWarpKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[0][j][e] = tile::less_lse(s[0][j][e], lse[e / 2]);
      }
    }
#pragma unroll
    for (int j = 0; j < kWarpKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float p = ptx::exp2(fmaf(s[0][j][e], shape.score_log2, -mod.lse_log2(lse[e / 2])));
        s[0][j][e] = p * dp[0][j][e];
      }
    }
  }

  __device__ __forceinline__ void run() {
    const tile::Mask mask(shape, seq.shift, seq.seqlen_k);
    const int last = min(m0 + kBlockM, seq.seqlen_q) - 1;
    const tile::Range keys = mask.any_row(m0, last);
    const tile::Range tiles = tiles_of(keys, kBlockN);
    if (tiles.begin < tiles.end) copy_q(), copy_dout(), copy_v(tiles.begin);
#pragma unroll 1
    for (int n = tiles.begin; n < tiles.end; ++n) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // V is in, and all have read K of the step before
      copy_k(n);
      Scores dp, s;
      multiply(dp, kMap.dout, kMap.v);
      ptx::cp_async_wait<0>();
      __syncthreads();  // K is in, and all have read V
      if (n + 1 < tiles.end) copy_v(n + 1);
      multiply(s, kMap.q, kMap.k);
      gradients(n, s, dp);
      std::uint32_t rDs[1][kWarpKeys / 16][4];
#pragma unroll
      for (int j = 0; j < kWarpKeys / 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          rDs[0][j / 2][j % 2 * 2 + h] = tile::pack<T>(s[0][j][2 * h], s[0][j][2 * h + 1]);
      }
      tile::mma::multiply_pv<T, kHeadDim, 0, kWarpKeys>(
          acc, rDs,
          base + kMap.k + split * kWarpKeys * kRowBytes +
              tile::mma::lane_offset_down<kHeadDim>(lane));
    }
    if constexpr (kTile.key_splits > 1) add_up_splits();
    if (split == 0) store();
  }

  // Adds what the second half of the warps has to what the first half has, over Q and dO.
  __device__ __forceinline__ void add_up_splits() {
    static_assert(kTile.key_splits == 2);
    float* part = reinterpret_cast<float*>(smem) + warp_row * kHeadDim + lane;
    __syncthreads();  // all have read Q and dO
    if (split == 1) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) part[32 * i] = acc[0][i / 4][i % 4];
    }
    __syncthreads();
    if (split == 0) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) acc[0][i / 4][i % 4] += part[32 * i];
    }
  }

  __device__ __forceinline__ void store() const {
    const MutableTensorView& view = params.dq;
    T* rows = seq.template rows<T>(view, seq.start_q, head);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane_row() + 8 * h;
      const bool exists = row < seq.seqlen_q;
      store_row<T, kHeadDim>(rows + (exists ? row : 0) * view.row_stride, exists,
                             static_cast<int>(params.forward.head_dim), shape.store_bytes,
                             shape.softmax_scale, lane, [&](int j) { return acc[0][j] + 2 * h; });
    }
  }
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    queries_kernel(const __grid_constant__ BackwardParams params,
                   const __grid_constant__ Shape shape) {
  const tile::WorkTile work = tile::scheduled_tile(shape, blockIdx.x);
  ptx::wait_for_grids_ahead();
  if (blockIdx.x >= shape.num_blocks) return;
  const SequenceOf seq(params.forward, work.batch);
  if (work.m_block * query_tile(kHeadDim).block_m >= seq.seqlen_q) return;
  QueryBlock<T, kHeadDim>(params, shape, seq, work).run();
}

}  // namespace dlattn::backward_wmma
