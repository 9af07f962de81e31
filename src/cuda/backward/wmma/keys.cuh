#pragma once

// dK and dV, and in the fast mode a block's part of dQ: a block of 8 warps owns block_n keys of one
// KV head and walks the queries that see them, block_m at a time, of one query head of the group
// after the other.
//
// Two warps share 16 or 32 keys, with keys as the rows of accumulators. Warp w computes
// S^T = K Q^T, then P^T, and dV += P^T dO; warp w + 4, on the same tensor core,
// dP^T = V dO^T, dS^T = P^T (dP^T - delta), and dK += dS^T Q. Both are the same two products, and a
// warp has the accumulators of one gradient alone, of twice the keys that it could have of both: a
// fragment of Q or dO from shared memory feeds twice the products. P goes from one to the other by
// way of shared memory, in fp32 and so in two halves, one after the other in the same place. There
// the second warp leaves dS: operand a of dQ = dS K, which all warps share and add to global
// memory. Shared memory: KeySmem. Barriers: the block's twice a step: when Q and dO are in, and
// when dS is, from where on dO may be overwritten; and between them those of a pair, when half of P
// is in, and when the first half has been read. Without dQ two more of the block's, when dO is in:
// where warps wait that make dK, and those that make dV.

#include "cuda/backward/wmma/dq_sum.cuh"
#include "cuda/backward/wmma/key_walk.cuh"
#include "cuda/backward/wmma/score.cuh"
#include "cuda/backward/wmma/store.cuh"
#include "cuda/backward/wmma/traits.h"
#include "cuda/plan/backward_workspace.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/tile/mma/products.cuh"
#include "cuda/tile/swizzled_copy.cuh"

namespace dlattn::backward_wmma {

template <typename T, int kHeadDim>
struct KeyBlock {
  static constexpr KeyTile kTile = key_tile(kHeadDim);
  static constexpr KeySmem kMap = key_smem(kHeadDim);
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kKeyTiles = pair_keys(kHeadDim) / 16;
  static constexpr int kGroups = kBlockM / 8;  // of queries, that a product has
  static constexpr int kRowBytes = kHeadDim * kElementBytes;
  using Rows = tile::SwizzledRows<kHeadDim>;
  // dS: a row a key, as long as swizzled rows must be: with few queries two keys share one.
  static constexpr int kDsColumns = kBlockM < 32 ? 32 : kBlockM;
  static constexpr int kDsRows = kBlockN * kBlockM / kDsColumns;
  using DsRows = tile::SwizzledRows<kDsColumns>;
  static constexpr int kHalf = kKeyTiles * kGroups / 2;
  // Barriers of pairs: P is in its place, and has been read.
  static constexpr int kFullBarrier = 1, kFreeBarrier = 1 + kPairs;
  static constexpr int kDoutBarrier = 1 + 2 * kPairs;  // two: of warps that make dK, and dV
  using Scores = float[kKeyTiles][kGroups][4];
  using Operand = std::uint32_t[kKeyTiles][kBlockM / 16][4];

  const BackwardParams& params;
  const Shape& shape;
  const KeyWalk<kBlockM>& walk;
  unsigned char* smem;
  ptx::SmemAddress base;
  int lane, warp, pair;
  bool makes_dk;  // else P and dV
  float acc[kKeyTiles][kHeadDim / 8][4];
  float slope_sum = 0.0f;  // of dS |position - key|, a lane's of a head

  __device__ __forceinline__ KeyBlock(const BackwardParams& params, const Shape& shape,
                                      const KeyWalk<kBlockM>& walk)
      : params(params), shape(shape), walk(walk), smem(ptx::dynamic_smem()) {
    base = ptx::smem_address(smem);
    lane = static_cast<int>(threadIdx.x) % 32;
    warp = static_cast<int>(threadIdx.x) / 32;
    pair = warp % kPairs;
    makes_dk = warp >= kPairs;
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[k][j][e] = 0.0f;
      }
    }
  }

  // Copies of a step. Q comes with lse, dO with delta.
  __device__ __forceinline__ void copy_q(const QueryStep& step, int stage) const {
    const int head = walk.head(step);
    const AttentionParams& p = params.forward;
    const int m0 = step.m * kBlockM;
    tile::copy_swizzled_rows<kBlockM, kHeadDim, kNumThreads>(
        base + kMap.q + stage * kBlockM * kRowBytes,
        walk.seq.template rows<const T>(p.q, walk.seq.start_q, head) + m0 * p.q.row_stride,
        p.q.row_stride, walk.seq.seqlen_q - m0, static_cast<int>(p.head_dim));
    copy_row_numbers(kMap.lse + stage * kBlockM * 4, shape.lse, head, m0);
  }
  __device__ __forceinline__ void copy_dout(const QueryStep& step) const {
    const int head = walk.head(step);
    const int m0 = step.m * kBlockM;
    const bool any = params.dout.data != nullptr;
    const TensorView& dout = any ? params.dout : params.forward.q;
    tile::copy_swizzled_rows<kBlockM, kHeadDim, kNumThreads>(
        base + kMap.dout,
        walk.seq.template rows<const T>(dout, walk.seq.start_q, head) + m0 * dout.row_stride,
        dout.row_stride, any ? walk.seq.seqlen_q - m0 : 0,
        static_cast<int>(params.forward.head_dim_v));
    copy_row_numbers(kMap.delta, shape.delta, head, m0);
  }
  // A number of each row. Rows beyond the sequence have them, too.
  __device__ __forceinline__ void copy_row_numbers(int at, const float* from, int head,
                                                   int m0) const {
    const int i = static_cast<int>(threadIdx.x) * 4;
    if (i >= kBlockM) return;
    from += walk.first_row + head * shape.delta_rows + m0 + i;
    ptx::cp_async<16>(base + at + 4 * i, from, true);
  }
  __device__ __forceinline__ void copy_keys() const {
    const AttentionParams& p = params.forward;
    const SequenceOf& seq = walk.seq;
    tile::copy_swizzled_rows<kBlockN, kHeadDim, kNumThreads>(
        base + kMap.k,
        seq.template rows<const T>(p.k, seq.start_k, walk.head_kv) + walk.n0 * p.k.row_stride,
        p.k.row_stride, seq.seqlen_k - walk.n0, static_cast<int>(p.head_dim));
    tile::copy_swizzled_rows<kBlockN, kHeadDim, kNumThreads>(
        base + kMap.v,
        seq.template rows<const T>(p.v, seq.start_k, walk.head_kv) + walk.n0 * p.v.row_stride,
        p.v.row_stride, seq.seqlen_k - walk.n0, static_cast<int>(p.head_dim_v));
  }

  // This lane's first key in the block, and where its words (row tile k, half h, group j) of dS
  // stand.
  __device__ __forceinline__ int lane_key() const { return pair * 16 * kKeyTiles + lane / 4; }
  __device__ __forceinline__ std::uint32_t* ds_word(int k, int h, int j) const {
    const int key = lane_key() + 16 * k;
    const int chunk = j + key / kDsRows * kGroups;
    const int at = DsRows::offset(key % kDsRows, chunk) + lane % 4 * 4;
    return reinterpret_cast<std::uint32_t*>(smem + kMap.ds + at + 8 * h * DsRows::kRowBytes);
  }
  // P goes from warp to warp in two halves, each of kHalf products' accumulators.
  __device__ __forceinline__ float* exchange_slot(int i) const {
    return reinterpret_cast<float*>(smem + kMap.p) + ((pair * kHalf + i) * 32 + lane) * 4;
  }
  template <typename Use>
  __device__ __forceinline__ static void for_each_half(Use use) {
#pragma unroll
    for (int half = 0; half < 2; ++half) use(half, half * kHalf);
  }

  // P^T of a step from S^T, left for the pair's other warp and as operand a.
  __device__ __forceinline__ void probabilities(const QueryStep& step, int stage, Scores& x,
                                                Operand& rP) const {
    const int m0 = step.m * kBlockM + lane % 4 * 2;
    const int n0 = walk.n0 + lane_key();
    const auto visit = [&](auto use) {
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) use(x[k][j][e], m0 + 8 * j + e % 2, n0 + 16 * k + e / 2 * 8);
        }
      }
    };
    const ScoreMod<T> mod(params.forward, shape, walk.seq, walk.batch, walk.head(step));
    // Softcap's factors of gradients wait in the registers that P will have, as 16 bits each.
    mod.apply(visit, [&](int i, float factor) {
      const int e = i % 4, j = i / 4 % kGroups, k = i / 4 / kGroups;
      std::uint32_t& word = rP[k][j / 2][j % 2 * 2 + e / 2];
      const auto fixed = static_cast<std::uint32_t>(fmaf(factor, 65535.0f, 0.5f));
      word = e % 2 == 0 ? fixed : word | fixed << 16;
    });
    if (!walk.all_visible(step)) hide_by_position(step, x);

    const float* lse = reinterpret_cast<const float*>(smem + kMap.lse) + stage * kBlockM;
    if (shape.natural_lse) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        float rLse[2];
        tile::load(rLse, lse + 8 * j + lane % 4 * 2);
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
          for (int e = 0; e < 4; ++e) x[k][j][e] = tile::less_lse(x[k][j][e], rLse[e % 2]);
        }
      }
    }
    for_each_half([&](int half, int first) {
#pragma unroll
      for (int u = first; u < first + kHalf; ++u) {
        const int k = u / kGroups, j = u % kGroups;
        float rLse[2];
        tile::load(rLse, lse + 8 * j + lane % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[k][j][e] = ptx::exp2(fmaf(x[k][j][e], shape.score_log2, -mod.lse_log2(rLse[e % 2])));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float* const p = x[k][j] + 2 * h;
          const std::uint32_t packed = tile::pack<T>(p[0], p[1]);
          std::uint32_t& word = rP[k][j / 2][j % 2 * 2 + h];
          if (shape.softcap != 0.0f) {
            p[0] *= static_cast<float>(word & 0xFFFF) * (1.0f / 65535.0f);
            p[1] *= static_cast<float>(word >> 16) * (1.0f / 65535.0f);
          }
          word = packed;
        }
      }
      if (half == 1) ptx::barrier_sync(kFreeBarrier + pair, 64);
#pragma unroll
      for (int u = first; u < first + kHalf; ++u)
        tile::store(exchange_slot(u - first), x[u / kGroups][u % kGroups]);
      ptx::barrier_arrive(kFullBarrier + pair, 64);
    });
  }

  __device__ __forceinline__ void hide_by_position(const QueryStep& step, Scores& x) const {
    const tile::Mask mask(shape, walk.seq.shift, walk.seq.seqlen_k);
    const int n0 = walk.n0 + lane_key();
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const tile::Range visible = mask.row(step.m * kBlockM + 8 * j + lane % 4 * 2 + e, n0);
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (!tile::contains(visible, 16 * k + 8 * h)) x[k][j][2 * h + e] = -INFINITY;
          }
        }
      }
    }
  }

  // dS^T of a step from dP^T and P^T, left for dQ and as operand a.
  __device__ __forceinline__ void gradients(const QueryStep& step, Scores& x, Operand& rDs) {
    const float* delta = reinterpret_cast<const float*>(smem + kMap.delta);
    const int position = step.m * kBlockM + lane % 4 * 2 + walk.seq.shift - walk.n0 - lane_key();
    for_each_half([&](int half, int first) {
      ptx::barrier_sync(kFullBarrier + pair, 64);
#pragma unroll
      for (int u = first; u < first + kHalf; ++u) {
        const int k = u / kGroups, j = u % kGroups;
        float rDelta[2], p[4];
        tile::load(rDelta, delta + 8 * j + lane % 4 * 2);
        tile::load(p, exchange_slot(u - first));
#pragma unroll
        for (int e = 0; e < 4; ++e) x[k][j][e] = p[e] * (x[k][j][e] - rDelta[e % 2]);
      }
      if (half == 0) ptx::barrier_arrive(kFreeBarrier + pair, 64);
    });
    __syncwarp();  // dS takes the place of P
#pragma unroll
    for (int u = 0; u < 2 * kHalf; ++u) {
      const int k = u / kGroups, j = u % kGroups;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *ds_word(k, h, j) = rDs[k][j / 2][j % 2 * 2 + h] =
            tile::pack<T>(x[k][j][2 * h], x[k][j][2 * h + 1]);
      }
    }
    if (!shape.slope_parts) return;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int distance = position + 8 * j + e % 2 - 16 * k - e / 2 * 8;
          slope_sum = fmaf(x[k][j][e], fabsf(static_cast<float>(distance)), slope_sum);
        }
      }
    }
  }

  // Both products of this warp for a step whose Q and dO are in shared memory.
  __device__ __forceinline__ void multiply(const QueryStep& step, int stage) {
    const ptx::SmemAddress q = base + kMap.q + stage * kBlockM * kRowBytes, dout = base + kMap.dout;
    const ptx::SmemAddress keys = base + (makes_dk ? kMap.v : kMap.k) +
                                  pair * 16 * kKeyTiles * kRowBytes +
                                  tile::mma::lane_offset_down<kHeadDim>(lane);
    const bool late_dout = !shape.dq_sum;
    if (late_dout && makes_dk) wait_for_dout(true);
    Scores x;
    tile::mma::multiply_qk<T, kHeadDim, 0, kBlockM>(
        x, (makes_dk ? dout : q) + tile::mma::lane_offset_across<kHeadDim>(lane),
        [&](std::uint32_t (&a)[kKeyTiles][4], int d) { tile::mma::load_q<kHeadDim>(a, keys, d); });
    if (late_dout && !makes_dk) wait_for_dout(false);
    Operand a;
    if (makes_dk) {
      gradients(step, x, a);
    } else {
      probabilities(step, stage, x, a);
    }
    tile::mma::multiply_pv<T, kHeadDim, 0, kBlockM>(
        acc, a, (makes_dk ? q : dout) + tile::mma::lane_offset_down<kHeadDim>(lane));
  }

  // Where no dQ is made between the barrier that frees dO and the next step, dO comes later than Q:
  // warps that begin with Q need not wait. Either half of the warps waits at a barrier of its own,
  // by one instruction, and says at the other's that its part of dO is in.
  __device__ __forceinline__ void wait_for_dout(bool dk) const {
    ptx::cp_async_wait<1>();  // not for the next step's Q
    ptx::barrier_arrive(kDoutBarrier + (dk ? 1 : 0), kNumThreads);
    ptx::barrier_sync(kDoutBarrier + (dk ? 0 : 1), kNumThreads);
  }

  // Adds dS K of a step to dQ: a warp one part.
  __device__ __forceinline__ void add_dq(const QueryStep& step) const {
    constexpr int kColumnParts = kHeadDim / kPartColumns, kRowParts = kBlockM / kPartRows;
    static_assert(kColumnParts * kRowParts == kNumWarps, "a warp has one part");
    const int row_part = warp % kRowParts, column_part = warp / kRowParts;
    const int part = step.m * kRowParts + row_part;
    if (part * kPartRows >= walk.seq.seqlen_q) return;
    const ptx::SmemAddress ds =
        (base + kMap.ds + tile::mma::lane_offset_across<kDsColumns>(lane)) ^ (row_part * 32);
    const ptx::SmemAddress k = Rows::block(
        base + kMap.k + tile::mma::lane_offset_down<kHeadDim>(lane), 0, column_part * kPartColumns);
    float dq[kPartColumns / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kBlockN; n += 16) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4_trans(a, DsRows::block(ds, n % kDsRows, n / kDsRows * kBlockM));
#pragma unroll
      for (int d = 0; d < kPartColumns; d += 16) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, Rows::block(k, n, d));
        ptx::mma_m16n8k16<T>(dq[d / 8], a, b[0], b[1]);
        ptx::mma_m16n8k16<T>(dq[d / 8 + 1], a, b[2], b[3]);
      }
    }
    add_to_sum(dq_part(params, shape, walk.seq, walk.batch, walk.head(step), part, kColumnParts) +
                   column_part * kPartSize,
               lane, dq);
  }

  // After a head's last step: its part of the gradient of the slope.
  __device__ __forceinline__ void store_slope_part(const QueryStep& step) {
    if (!shape.slope_parts || !makes_dk) return;
    const float sum = tile::reduce_sum<32>(slope_sum);
    if (lane == 0) walk.slope_part(step.group_head)[pair] = -sum;
    slope_sum = 0.0f;
  }

  __device__ __forceinline__ void run() {
    QueryStep step = walk.first();
    copy_keys();
    if (walk.any()) copy_q(step, 0);
    ptx::cp_async_commit();
    if (walk.any()) copy_dout(step);
    ptx::cp_async_commit();
    int stage = 0;
#pragma unroll 1
    for (bool more = walk.any(); more; stage ^= 1) {
      const QueryStep next = walk.next(step);
      more = walk.exists(next);
      if (shape.dq_sum) {
        ptx::cp_async_wait<0>();
      } else {
        ptx::cp_async_wait<1>();  // not for dO
      }
      __syncthreads();
      if (more) copy_q(next, stage ^ 1);
      ptx::cp_async_commit();
      multiply(step, stage);
      __syncthreads();
      if (more) copy_dout(next);
      ptx::cp_async_commit();
      if (shape.dq_sum) add_dq(step);
      if (next.group_head != step.group_head) store_slope_part(step);
      step = next;
    }
    ptx::cp_async_wait<0>();
    store();
  }

  __device__ __forceinline__ void store() const {
    const AttentionParams& p = params.forward;
    const SequenceOf& seq = walk.seq;
    const MutableTensorView& view = makes_dk ? params.dk : params.dv;
    if (!view.data) return;
    T* rows = seq.template rows<T>(view, seq.start_k, walk.head_kv);
    const int columns = static_cast<int>(makes_dk ? p.head_dim : p.head_dim_v);
    const float scale = makes_dk ? shape.softmax_scale : 1.0f;
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = walk.n0 + lane_key() + 16 * k + 8 * h;
        const bool exists = key < seq.rows_k;
        store_row<T, kHeadDim>(rows + (exists ? key : 0) * view.row_stride, exists, columns,
                               shape.store_bytes, scale, lane,
                               [&](int j) { return acc[k][j] + 2 * h; });
      }
    }
  }
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    keys_kernel(const __grid_constant__ BackwardParams params,
                const __grid_constant__ Shape shape) {
  using Block = KeyBlock<T, kHeadDim>;
  const tile::WorkTile work = tile::scheduled_tile(shape, blockIdx.x);
  ptx::wait_for_grids_ahead();
  if (blockIdx.x >= shape.num_blocks) return;
  const KeyWalk<Block::kBlockM> walk(params.forward, shape, work, Block::kBlockN);
  if (walk.n0 >= walk.seq.rows_k || !walk.any()) walk.clear_slope_parts();
  if (walk.n0 >= walk.seq.rows_k) return;
  Block(params, shape, walk).run();
}

}  // namespace dlattn::backward_wmma
