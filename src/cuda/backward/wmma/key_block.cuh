#pragma once

#include <utility>

#include "cuda/backward/wmma/dq_sum.cuh"
#include "cuda/backward/wmma/key_walk.cuh"
#include "cuda/backward/wmma/score.cuh"
#include "cuda/backward/wmma/store.cuh"
#include "cuda/backward/wmma/traits.h"
#include "cuda/plan/backward_workspace.h"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/mma/products.cuh"
#include "cuda/tile/stages.cuh"
#include "cuda/tile/swizzled_copy.cuh"

namespace dlattn::backward_wmma {

// The common part of blocks of keys (keys.cuh): copies, scores and their gradients, dQ.
//
// A warp has kRowTiles times 16 keys, group() of the block's. kSharers warps may share them: a warp
// has part part() of the queries of a step and of the columns of the keys' gradients.
template <typename T, int kHeadDim, bool kIsLarge = false>
struct KeyBlock {
  static constexpr KeyTile kTile = key_tile(kHeadDim, kIsLarge);
  static constexpr KeySmem kMap = key_smem(kHeadDim, kIsLarge);
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kWarps = kTile.num_warps, kThreads = 32 * kWarps;
  static constexpr int kRowTiles = kTile.row_tiles;
  static constexpr int kSharers = kTile.sharers;
  static constexpr int kKeyGroups = kTile.groups();
  static constexpr bool kNeighbours = !kIsLarge && !tile::kFastTensorCores;
  static_assert(kBlockN == 16 * kRowTiles * kKeyGroups);
  static constexpr int kOwnQueries = kBlockM / kSharers;
  static constexpr int kOwnColumns = kHeadDim / kSharers;
  static constexpr int kGroups = kOwnQueries / 8;  // that a product has
  static constexpr int kRowBytes = kHeadDim * kElementBytes;
  static constexpr int kDsSteps = kTile.ds_steps, kDsColumns = kBlockM * kDsSteps;
  using Rows = tile::SwizzledRows<kHeadDim>;
  using DsRows = tile::SwizzledRows<kDsColumns>;  // a row a key
  using Scores = float[kRowTiles][kGroups][4];
  using Operand = std::uint32_t[kRowTiles][kOwnQueries / 16][4];
  using Accumulators = float[kRowTiles][kOwnColumns / 8][4];
  using Walk = KeyWalk<kBlockM, kWarps>;

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
    if constexpr (kSharers == 1) warp = uniform(warp);
  }

  __device__ __forceinline__ int group() const {
    return kSharers == 1 ? warp : kNeighbours ? warp / kSharers : warp % kKeyGroups;
  }
  __device__ __forceinline__ int part() const {
    return kSharers == 1 ? 0 : kNeighbours ? warp % kSharers : warp / kKeyGroups;
  }

  // A number of which the compiler does not know that it is the same in every step.
  __device__ __forceinline__ static int again(int x) {
    return static_cast<int>(ptx::reread(static_cast<unsigned>(x)) & 31u);
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

  // Where the rows of a query head begin: of Q and dO, and its numbers of rows in lse and delta.
  struct HeadRows {
    int group_head;
    const T* q;
    const T* dout;
    std::int64_t numbers;
  };
  HeadRows rows = {-1, nullptr, nullptr, 0};

  __device__ __forceinline__ void begin_head(const QueryStep& step) {
    if (step.group_head == rows.group_head) return;
    const int head = walk.head(step);
    const TensorView& from = params.dout.data ? params.dout : params.forward.q;
    rows = {step.group_head,
            walk.seq.template rows<const T>(params.forward.q, walk.seq.start_q, head),
            walk.seq.template rows<const T>(from, walk.seq.start_q, head),
            padded_row_index(params.forward, walk.batch, head, walk.seq.start_q)};
  }

  // Copies of a step. Q comes with lse, dO with delta.
  __device__ __forceinline__ void copy_q(const QueryStep& step, int stage) const {
    const AttentionParams& p = params.forward;
    const int m0 = step.m * kBlockM;
    copy_rows(q(stage), rows.q + m0 * p.q.row_stride, p.q.row_stride, walk.seq.seqlen_q - m0,
              static_cast<int>(p.head_dim));
    copy_row_numbers(kMap.lse + stage * kBlockM * 4, shape.lse, m0);
  }
  __device__ __forceinline__ void copy_dout(const QueryStep& step, int stage) const {
    const int m0 = step.m * kBlockM;
    const bool any = params.dout.data != nullptr;
    const std::int64_t stride = any ? params.dout.row_stride : params.forward.q.row_stride;
    copy_rows(dout(stage), rows.dout + m0 * stride, stride, any ? walk.seq.seqlen_q - m0 : 0,
              static_cast<int>(params.forward.head_dim_v));
    copy_row_numbers(kMap.delta + (kMap.dout_stage == 0 ? 0 : stage) * kBlockM * 4, shape.delta,
                     m0);
  }
  // As tile::copy_swizzled_rows, of which little is kept in registers.
  __device__ __forceinline__ static void copy_rows(ptx::SmemAddress to, const T* from,
                                                   std::int64_t stride, int count, int columns) {
    constexpr unsigned kPerRow = kHeadDim / 8, kStep = kThreads / kPerRow;
    static_assert(kStep % 8 == 0 && kBlockM % kStep == 0);
    const unsigned first = threadIdx.x / kPerRow, chunk = threadIdx.x % kPerRow;
    to += Rows::offset(static_cast<int>(first), static_cast<int>(chunk));
    from += first * stride + chunk * 8;
    const int end = static_cast<int>(chunk * 8) < columns ? count - static_cast<int>(first) : 0;
#pragma unroll
    for (int row = 0; row < kBlockM; row += static_cast<int>(kStep)) {
      ptx::cp_async<16>(to + row * kRowBytes, from, row < end);
      from += kStep * stride;
    }
  }
  // A number of each row. Rows beyond the sequence have them, too.
  __device__ __forceinline__ void copy_row_numbers(int at, const float* from, int m0) const {
    const unsigned i = threadIdx.x * 4;
    if (i >= kBlockM) return;
    ptx::cp_async<16>(base + at + static_cast<int>(4 * i), from + (rows.numbers + m0) + i, true);
  }
  // A block's rows of K or V, to byte `at`.
  __device__ __forceinline__ void copy_keys(int at, const TensorView& x,
                                            std::int64_t columns) const {
    tile::copy_swizzled_rows<kBlockN, kHeadDim, kThreads>(
        base + at,
        walk.seq.template rows<const T>(x, walk.seq.start_k, walk.head_kv) + walk.n0 * x.row_stride,
        x.row_stride, walk.seq.seqlen_k - walk.n0, static_cast<int>(columns));
  }

  // This lane's first key in the block, and its first query of a step.
  __device__ __forceinline__ int lane_key() const { return group() * 16 * kRowTiles + lane / 4; }
  __device__ __forceinline__ int lane_query(const QueryStep& step) const {
    return step.m * kBlockM + part() * kOwnQueries + lane % 4 * 2;
  }
  // The same within the step.
  __device__ __forceinline__ int lane_row() const { return part() * kOwnQueries + lane % 4 * 2; }

  // Leaves kCount groups of the warp's queries of P or dS at byte `at`.
  template <int kFirst = 0, int kCount = kGroups>
  __device__ __forceinline__ void leave(int at, const Operand& operand, int beside = 0) const {
    const int lane = again(this->lane);
    const int first = group() * 16 * kRowTiles + lane / 4;
#pragma unroll
    for (int k = 0; k < kRowTiles; ++k) {
#pragma unroll
      for (int j = kFirst; j < kFirst + kCount; ++j) {
        const int chunk = (part() + beside) * kGroups + j;
        unsigned char* const word =
            ptx::dynamic_smem() + at + DsRows::offset(first, chunk) + lane % 4 * 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          *reinterpret_cast<std::uint32_t*>(word + (16 * k + 8 * h) * DsRows::kRowBytes) =
              operand[k][j / 2][j % 2 * 2 + h];
        }
      }
    }
  }

  // Modifies the scores of a step's kCount groups of queries from kFirst on and hides keys, up to
  // the exponentials. `capped` as in ScoreMod::apply().
  template <int kFirst, int kCount, typename Capped>
  __device__ __forceinline__ void modify(const ScoreMod<T>& mod, const QueryStep& step, int stage,
                                         Scores& x, Capped capped) const {
    const int m0 = lane_query(step);
    const int n0 = walk.n0 + lane_key();
    const auto visit = [&](auto use) {
#pragma unroll
      for (int k = 0; k < kRowTiles; ++k) {
#pragma unroll
        for (int j = kFirst; j < kFirst + kCount; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) use(x[k][j][e], m0 + 8 * j + e % 2, n0 + 16 * k + e / 2 * 8);
        }
      }
    };
    mod.apply(visit, capped);
    if (!walk.all_visible(step)) hide_by_position<kFirst, kCount>(step, x);
    if (!shape.natural_lse) return;
#pragma unroll
    for (int j = kFirst; j < kFirst + kCount; ++j) {
      float rLse[2];
      tile::load(rLse, lse(stage) + lane_row() + 8 * j);
#pragma unroll
      for (int k = 0; k < kRowTiles; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[k][j][e] = tile::less_lse(x[k][j][e], rLse[e % 2]);
      }
    }
  }

  template <int kFirst, int kCount>
  __device__ __forceinline__ void hide_by_position(const QueryStep& step, Scores& x) const {
    const tile::Mask mask(shape, walk.seq.shift, walk.seq.seqlen_k);
    const int n0 = walk.n0 + lane_key();
#pragma unroll
    for (int j = kFirst; j < kFirst + kCount; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const tile::Range visible = mask.row(lane_query(step) + 8 * j + e, n0);
#pragma unroll
        for (int k = 0; k < kRowTiles; ++k) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (!tile::contains(visible, 16 * k + 8 * h)) x[k][j][2 * h + e] = -INFINITY;
          }
        }
      }
    }
  }

  // Whether scores of a step are those of the products, all of them seen, and lse is in base 2.
  __device__ __forceinline__ bool is_plain(const QueryStep& step) const {
    return !shape.natural && !shape.natural_lse && !params.forward.mask.data &&
           walk.all_visible(step);
  }

  // P^T from S^T and dS^T from dP^T of kCount groups of queries of a step, as operands a.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void gradients(const QueryStep& step, bool plain, int stage, Scores& p,
                                            Scores& ds, Operand& rP, Operand& rDs) {
    bool natural_lse = false;
    if (!plain) {
      const ScoreMod<T> mod(params.forward, shape, walk.seq, walk.batch, walk.head(step));
      modify<kFirst, kCount>(mod, step, stage, p, [&](int i, float factor) {
        const int k = i / 4 / kCount, j = i / 4 % kCount + kFirst, e = i % 4;
        float rDelta[2];
        tile::load(rDelta, delta(stage) + lane_row() + 8 * j);
        ds[k][j][e] = fmaf(ds[k][j][e] - rDelta[e % 2], factor, rDelta[e % 2]);
      });
      natural_lse = shape.natural_lse;
    }
#pragma unroll
    for (int j = kFirst; j < kFirst + kCount; ++j) {
      float rLse[2], rDelta[2];
      tile::load(rLse, lse(stage) + lane_row() + 8 * j);
      tile::load(rDelta, delta(stage) + lane_row() + 8 * j);
#pragma unroll
      for (int k = 0; k < kRowTiles; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = p[k][j][e];
          x = ptx::exp2(fmaf(x, shape.score_log2, natural_lse ? 0.0f : -rLse[e % 2]));
          ds[k][j][e] = (ds[k][j][e] - rDelta[e % 2]) * x;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          rP[k][j / 2][j % 2 * 2 + h] = tile::pack<T>(p[k][j][2 * h], p[k][j][2 * h + 1]);
          rDs[k][j / 2][j % 2 * 2 + h] = tile::pack<T>(ds[k][j][2 * h], ds[k][j][2 * h + 1]);
        }
      }
    }
    if (shape.slope_parts) add_to_slope<kFirst, kCount>(step, ds);
  }

  template <int... kIndices, typename Use>
  __device__ __forceinline__ static void for_each_sixteen(std::integer_sequence<int, kIndices...>,
                                                          Use use) {
    (use(std::integral_constant<int, kIndices>()), ...);
  }

  // Adds up what the gradient of the slope takes of dS.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void add_to_slope(const QueryStep& step, const Scores& ds) {
    const int position = lane_query(step) + walk.seq.shift - walk.n0 - lane_key();
#pragma unroll
    for (int j = kFirst; j < kFirst + kCount; ++j) {
#pragma unroll
      for (int k = 0; k < kRowTiles; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int distance = position + 8 * j + e % 2 - 16 * k - e / 2 * 8;
          slope_sum = fmaf(ds[k][j][e], fabsf(static_cast<float>(distance)), slope_sum);
        }
      }
    }
  }
  // After a head's last step: its part of the gradient of the slope.
  __device__ __forceinline__ void store_slope_part(const QueryStep& step) {
    const float sum = tile::reduce_sum<32>(slope_sum);
    if (lane == 0) walk.slope_part(step.group_head)[warp] = -sum;
    slope_sum = 0.0f;
  }

  // Adds dS K of a step to dQ, or of two that are side by side: a warp 32 queries by kDqColumns, in
  // parts of kPartColumns.
  __device__ __forceinline__ void add_dq(const QueryStep& first, const QueryStep& second,
                                         int stage) {
    constexpr int kRowParts = kBlockM / kPartRows, kColumnParts = kHeadDim / kPartColumns;
    constexpr int kOwnRowParts = kRowParts * kDsSteps / 2;
    constexpr int kParts = 2 * kColumnParts / kWarps;  // of a warp, in a row
    constexpr int kDqColumns = kParts * kPartColumns;
    // Worked out anew in every step: addresses would take registers.
    const int lane = again(this->lane);
    const int warp = kSharers == 1 ? this->warp : again(this->warp);
    const int half = warp % 2, column_part = warp / 2 * kParts;
    const int group_head = kDsSteps == 2 && half == 1 ? second.group_head : first.group_head;
    const QueryStep step = {group_head, kDsSteps == 2 && half == 1 ? second.m : first.m};
    const int part = step.m * kRowParts + (kDsSteps == 2 ? 0 : half * kOwnRowParts);
    if (part < 0 || part * kPartRows >= walk.seq.seqlen_q) return;
    const ptx::SmemAddress ds = (base + kMap.ds + stage * kMap.scores_stage +
                                 tile::mma::lane_offset_across<kDsColumns>(lane)) ^
                                (half * kOwnRowParts * 32);
    const ptx::SmemAddress k = Rows::block(
        base + kMap.k + tile::mma::lane_offset_down<kHeadDim>(lane), 0, column_part * kPartColumns);
    float dq[kOwnRowParts][kDqColumns / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kBlockN; n += 16) {
      std::uint32_t a[kOwnRowParts][4];
#pragma unroll
      for (int r = 0; r < kOwnRowParts; ++r)
        ptx::ldmatrix_x4_trans(a[r], DsRows::block(ds ^ (r * 32), n, 0));
#pragma unroll
      for (int d = 0; d < kDqColumns; d += 16) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, Rows::block(k, n, d));
#pragma unroll
        for (int r = 0; r < kOwnRowParts; ++r) {
          ptx::mma_m16n8k16<T>(dq[r][d / 8], a[r], b[0], b[1]);
          ptx::mma_m16n8k16<T>(dq[r][d / 8 + 1], a[r], b[2], b[3]);
        }
      }
    }
    float* const sum =
        dq_part(params, shape, walk.seq, walk.batch, walk.head(step), part, kColumnParts) +
        column_part * kPartSize;
#pragma unroll
    for (int r = 0; r < kOwnRowParts; ++r) {
      if (r > 0 && (part + r) * kPartRows >= walk.seq.seqlen_q) return;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        float of_part[kPartColumns / 8][4];
        memcpy(of_part, dq[r] + i * (kPartColumns / 8), sizeof of_part);
        add_to_sum(sum + (r * kColumnParts + i) * kPartSize, lane, of_part);
      }
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
    for (int k = 0; k < kRowTiles; ++k) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = walk.n0 + lane_key() + 16 * k + 8 * h;
        const bool exists = key < seq.rows_k;
        store_row<T, kOwnColumns>(rows + (exists ? key : 0) * view.row_stride, exists,
                                  static_cast<int>(columns) - first, shape.store_bytes, scale, lane,
                                  [&](int j) { return acc[k][j] + 2 * h; });
      }
    }
  }
};

}  // namespace dlattn::backward_wmma
