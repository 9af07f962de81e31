#pragma once

#include "cuda/backward/wmma/dq_sum.cuh"
#include "cuda/backward/wmma/key_walk.cuh"
#include "cuda/backward/wmma/score.cuh"
#include "cuda/backward/wmma/store.cuh"
#include "cuda/backward/wmma/traits.h"
#include "cuda/plan/backward_workspace.h"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/mma/products.cuh"
#include "cuda/tile/swizzled_copy.cuh"

namespace dlattn::backward_wmma {

// The common part of blocks of keys (keys.cuh): copies, scores and their gradients, dQ.
//
// A warp has 16 keys, group() of the block's. kSharers warps may share them: a warp has part
// part() of the queries of a step and of the columns of the keys' gradients.
template <typename T, int kHeadDim>
struct KeyBlock {
  static constexpr KeyTile kTile = key_tile(kHeadDim);
  static constexpr KeySmem kMap = key_smem(kHeadDim);
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kSharers = key_sharers(kHeadDim);
  static constexpr int kKeyGroups = key_groups(kHeadDim);
  static_assert(kBlockN == 16 * kKeyGroups);
  static constexpr int kOwnQueries = kBlockM / kSharers;
  static constexpr int kOwnColumns = kHeadDim / kSharers;
  static constexpr int kGroups = kOwnQueries / 8;  // that a product has
  static constexpr int kRowBytes = kHeadDim * kElementBytes;
  using Rows = tile::SwizzledRows<kHeadDim>;
  using DsRows = tile::SwizzledRows<kBlockM>;  // a row a key
  using Scores = float[1][kGroups][4];
  using Operand = std::uint32_t[1][kOwnQueries / 16][4];
  using Accumulators = float[1][kOwnColumns / 8][4];
  using Walk = KeyWalk<kBlockM>;

  const BackwardParams& params;
  const Shape& shape;
  const Walk& walk;
  ptx::SmemAddress base;
  int lane, warp;
  float slope_sum = 0.0f;  // of dS |position - key|, a lane's of a head

  __device__ __forceinline__ KeyBlock(const BackwardParams& params, const Shape& shape,
                                      const Walk& walk)
      : params(params), shape(shape), walk(walk) {
    base = ptx::smem_address(ptx::dynamic_smem());
    lane = static_cast<int>(threadIdx.x) % 32;
    warp = static_cast<int>(threadIdx.x) / 32;
  }

  __device__ __forceinline__ int group() const { return kSharers == 1 ? warp : warp % kKeyGroups; }
  __device__ __forceinline__ int part() const { return kSharers == 1 ? 0 : warp / kKeyGroups; }

  // A number of which the compiler does not know that it is the same in every step.
  __device__ __forceinline__ static int again(int x) {
    return static_cast<int>(ptx::reread(static_cast<unsigned>(x)));
  }

  __device__ __forceinline__ ptx::SmemAddress q(int stage) const {
    return base + kMap.q + stage * kMap.q_stage;
  }
  __device__ __forceinline__ ptx::SmemAddress dout(int stage) const {
    return base + kMap.dout + stage * kMap.dout_stage;
  }
  __device__ __forceinline__ const float* lse(int stage) const {
    return reinterpret_cast<const float*>(ptx::dynamic_smem() + kMap.lse) + stage * kBlockM;
  }
  __device__ __forceinline__ const float* delta(int stage) const {
    const int own_stage = kMap.dout_stage == 0 ? 0 : stage;
    return reinterpret_cast<const float*>(ptx::dynamic_smem() + kMap.delta) + own_stage * kBlockM;
  }

  // Copies of a step. Q comes with lse, dO with delta.
  __device__ __forceinline__ void copy_q(const QueryStep& step, int stage) const {
    const int head = walk.head(step);
    const AttentionParams& p = params.forward;
    const int m0 = step.m * kBlockM;
    tile::copy_swizzled_rows<kBlockM, kHeadDim, kNumThreads>(
        q(stage),
        walk.seq.template rows<const T>(p.q, walk.seq.start_q, head) + m0 * p.q.row_stride,
        p.q.row_stride, walk.seq.seqlen_q - m0, static_cast<int>(p.head_dim));
    copy_row_numbers(kMap.lse + stage * kBlockM * 4, shape.lse, head, m0);
  }
  __device__ __forceinline__ void copy_dout(const QueryStep& step, int stage) const {
    const int head = walk.head(step);
    const int m0 = step.m * kBlockM;
    const bool any = params.dout.data != nullptr;
    const TensorView& from = any ? params.dout : params.forward.q;
    tile::copy_swizzled_rows<kBlockM, kHeadDim, kNumThreads>(
        dout(stage),
        walk.seq.template rows<const T>(from, walk.seq.start_q, head) + m0 * from.row_stride,
        from.row_stride, any ? walk.seq.seqlen_q - m0 : 0,
        static_cast<int>(params.forward.head_dim_v));
    copy_row_numbers(kMap.delta + stage * kBlockM * 4, shape.delta, head, m0);
  }
  // A number of each row. Rows beyond the sequence have them, too.
  __device__ __forceinline__ void copy_row_numbers(int at, const float* from, int head,
                                                   int m0) const {
    const int i = static_cast<int>(threadIdx.x) * 4;
    if (i >= kBlockM) return;
    from += walk.first_row + head * shape.delta_rows + m0 + i;
    ptx::cp_async<16>(base + at + 4 * i, from, true);
  }
  // A block's rows of K or V, to byte `at`.
  __device__ __forceinline__ void copy_keys(int at, const TensorView& x,
                                            std::int64_t columns) const {
    tile::copy_swizzled_rows<kBlockN, kHeadDim, kNumThreads>(
        base + at,
        walk.seq.template rows<const T>(x, walk.seq.start_k, walk.head_kv) + walk.n0 * x.row_stride,
        x.row_stride, walk.seq.seqlen_k - walk.n0, static_cast<int>(columns));
  }

  // This lane's first key in the block, and its first query of a step.
  __device__ __forceinline__ int lane_key() const { return group() * 16 + lane / 4; }
  __device__ __forceinline__ int lane_query(const QueryStep& step) const {
    return step.m * kBlockM + part() * kOwnQueries + lane % 4 * 2;
  }
  // The same within the step.
  __device__ __forceinline__ int lane_row() const { return part() * kOwnQueries + lane % 4 * 2; }

  // Leaves the warp's part of P or dS at byte `at`.
  __device__ __forceinline__ void leave(int at, const Operand& operand) const {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int chunk = part() * kGroups + j;
      unsigned char* const word =
          ptx::dynamic_smem() + at + DsRows::offset(lane_key(), chunk) + lane % 4 * 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<std::uint32_t*>(word + 8 * h * DsRows::kRowBytes) =
            operand[0][j / 2][j % 2 * 2 + h];
      }
    }
  }

  // Modifies the scores of a step and hides keys, up to the exponentials. `capped` as in
  // ScoreMod::apply().
  template <typename Capped>
  __device__ __forceinline__ void modify(const ScoreMod<T>& mod, const QueryStep& step, int stage,
                                         Scores& x, Capped capped) const {
    const int m0 = lane_query(step);
    const int n0 = walk.n0 + lane_key();
    const auto visit = [&](auto use) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) use(x[0][j][e], m0 + 8 * j + e % 2, n0 + e / 2 * 8);
      }
    };
    mod.apply(visit, capped);
    if (!walk.all_visible(step)) hide_by_position(step, x);
    if (!shape.natural_lse) return;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      float rLse[2];
      tile::load(rLse, lse(stage) + lane_row() + 8 * j);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[0][j][e] = tile::less_lse(x[0][j][e], rLse[e % 2]);
    }
  }

  __device__ __forceinline__ void hide_by_position(const QueryStep& step, Scores& x) const {
    const tile::Mask mask(shape, walk.seq.shift, walk.seq.seqlen_k);
    const int n0 = walk.n0 + lane_key();
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const tile::Range visible = mask.row(lane_query(step) + 8 * j + e, n0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (!tile::contains(visible, 8 * h)) x[0][j][2 * h + e] = -INFINITY;
        }
      }
    }
  }

  // P^T from S^T and dS^T from dP^T of a step, as operands a.
  __device__ __forceinline__ void gradients(const QueryStep& step, int stage, Scores& p, Scores& ds,
                                            Operand& rP, Operand& rDs) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      float rDelta[2];
      tile::load(rDelta, delta(stage) + lane_row() + 8 * j);
#pragma unroll
      for (int e = 0; e < 4; ++e) ds[0][j][e] -= rDelta[e % 2];
    }
    const ScoreMod<T> mod(params.forward, shape, walk.seq, walk.batch, walk.head(step));
    modify(mod, step, stage, p, [&](int i, float factor) { ds[0][i / 4][i % 4] *= factor; });
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      float rLse[2];
      tile::load(rLse, lse(stage) + lane_row() + 8 * j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = p[0][j][e];
        x = ptx::exp2(fmaf(x, shape.score_log2, -mod.lse_log2(rLse[e % 2])));
        ds[0][j][e] *= x;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rP[0][j / 2][j % 2 * 2 + h] = tile::pack<T>(p[0][j][2 * h], p[0][j][2 * h + 1]);
        rDs[0][j / 2][j % 2 * 2 + h] = tile::pack<T>(ds[0][j][2 * h], ds[0][j][2 * h + 1]);
      }
    }
  }

  // Adds up what the gradient of the slope takes of dS.
  __device__ __forceinline__ void add_to_slope(const QueryStep& step, const Scores& ds) {
    const int position = lane_query(step) + walk.seq.shift - walk.n0 - lane_key();
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int distance = position + 8 * j + e % 2 - e / 2 * 8;
        slope_sum = fmaf(ds[0][j][e], fabsf(static_cast<float>(distance)), slope_sum);
      }
    }
  }
  // After a head's last step: its part of the gradient of the slope.
  __device__ __forceinline__ void store_slope_part(const QueryStep& step) {
    const float sum = tile::reduce_sum<32>(slope_sum);
    if (lane == 0) walk.slope_part(step.group_head)[warp] = -sum;
    slope_sum = 0.0f;
  }

  // Adds dS K of a step to dQ: a warp 16 queries by kDqColumns, in parts of kPartColumns.
  __device__ __forceinline__ void add_dq(const QueryStep& step, int stage = 0) const {
    constexpr int kRowParts = kBlockM / kPartRows, kColumnParts = kHeadDim / kPartColumns;
    constexpr int kParts = kRowParts * kColumnParts / kNumWarps;  // of a warp
    constexpr int kDqColumns = kParts * kPartColumns;
    // Worked out anew in every step: addresses would take registers.
    const int warp = again(this->warp), lane = again(this->lane);
    const int row_part = warp % kRowParts, column_part = warp / kRowParts * kParts;
    const int part = step.m * kRowParts + row_part;
    if (part * kPartRows >= walk.seq.seqlen_q) return;
    const ptx::SmemAddress ds =
        (base + kMap.ds + stage * kMap.ds_stage + tile::mma::lane_offset_across<kBlockM>(lane)) ^
        (row_part * 32);
    const ptx::SmemAddress k = Rows::block(
        base + kMap.k + tile::mma::lane_offset_down<kHeadDim>(lane), 0, column_part * kPartColumns);
    float dq[kDqColumns / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kBlockN; n += 16) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4_trans(a, DsRows::block(ds, n, 0));
#pragma unroll
      for (int d = 0; d < kDqColumns; d += 16) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, Rows::block(k, n, d));
        ptx::mma_m16n8k16<T>(dq[d / 8], a, b[0], b[1]);
        ptx::mma_m16n8k16<T>(dq[d / 8 + 1], a, b[2], b[3]);
      }
    }
    float* sum = dq_part(params, shape, walk.seq, walk.batch, walk.head(step), part, kColumnParts) +
                 column_part * kPartSize;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float of_part[kPartColumns / 8][4];
      memcpy(of_part, dq + i * (kPartColumns / 8), sizeof of_part);
      add_to_sum(sum + i * kPartSize, lane, of_part);
    }
  }

  // Stores the warp's part of dK or dV.
  __device__ __forceinline__ void store(const MutableTensorView& view, std::int64_t columns,
                                        float scale, const Accumulators& acc) const {
    if (!view.data) return;
    const SequenceOf& seq = walk.seq;
    const int first = part() * kOwnColumns;
    T* rows = seq.template rows<T>(view, seq.start_k, walk.head_kv) + first;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = walk.n0 + lane_key() + 8 * h;
      const bool exists = key < seq.rows_k;
      store_row<T, kOwnColumns>(rows + (exists ? key : 0) * view.row_stride, exists,
                                static_cast<int>(columns) - first, shape.store_bytes, scale, lane,
                                [&](int j) { return acc[0][j] + 2 * h; });
    }
  }
};

}  // namespace dlattn::backward_wmma
