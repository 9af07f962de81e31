#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/problem/score.h"
#include "cuda/backward/scalar/products.cuh"
#include "cuda/plan/backward_workspace.h"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/seqlen.cuh"

// One query head of one sequence: where its rows are, and the gradients of its scores.
namespace dlattn::backward_scalar {

// The rows of a sequence.
struct Sequence {
  int entry;  // of the batch; 0 with variable length
  int start_q = 0, start_k = 0;
  int seqlen_q, seqlen_k;
  int shift;  // query i stands at key position i + shift

  __device__ __forceinline__ Sequence(const AttentionParams& p, int batch)
      : entry(batch),
        seqlen_q(static_cast<int>(p.seqlen_q)),
        seqlen_k(static_cast<int>(p.seqlen_k)) {
    if (p.cu_seqlens_q) {
      const tile::SequenceRows queries = tile::query_rows(p, batch);
      const tile::SequenceRows keys = tile::key_rows(p, batch);
      entry = 0;
      start_q = queries.start, seqlen_q = queries.count;
      start_k = keys.start, seqlen_k = keys.count;
    }
    shift = position_shift(p.causal, seqlen_q, seqlen_k);
  }

  // Elements from a tensor's first to row 0 of a head. `start`: start_q or start_k.
  template <typename View>
  __device__ __forceinline__ std::int64_t offset(const View& x, int start, int head) const {
    return entry * x.batch_stride + start * x.row_stride + head * x.head_stride;
  }
  // Rows of lse lie side by side: its row stride is not set.
  template <typename View>
  __device__ __forceinline__ std::int64_t lse_offset(const View& lse, int head) const {
    return entry * lse.batch_stride + start_q + head * lse.head_stride;
  }
};

// The address of an element of a view of any dtype.
template <typename Void>
__device__ __forceinline__ Void* element_at(Void* data, DType dtype, std::int64_t offset) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  return static_cast<Byte*>(data) + offset * (dtype == DType::kFloat32 ? 4 : 2);
}

struct Head {
  const BackwardParams& params;
  const Sequence& seq;
  tile::Mask mask;
  int batch, head, head_kv;
  float slope;  // of ALiBi
  const float* lse;
  const float* delta;

  __device__ __forceinline__ Head(const BackwardParams& b, const Shape& shape, const Sequence& seq,
                                  int batch, int head)
      : params(b),
        seq(seq),
        mask(shape, seq.shift, seq.seqlen_k),
        batch(batch),
        head(head),
        head_kv(head / static_cast<int>(b.forward.num_heads / b.forward.num_heads_kv)),
        slope(tile::alibi_slope(b.forward, {0, head, batch})),
        lse(b.forward.lse.data ? b.forward.lse.data + seq.lse_offset(b.forward.lse, head)
                               : nullptr),  // there are no queries
        delta(DeltaRows(b, batch, head, seq.start_q).delta) {}

  __device__ __forceinline__ Rows rows(const TensorView& x, int start, int of_head, int end,
                                       std::int64_t columns) const {
    const void* const data = element_at(x.data, x.dtype, seq.offset(x, start, of_head));
    return {data, x.row_stride, x.dtype, end, static_cast<int>(columns)};
  }
  __device__ __forceinline__ Rows q() const {
    const AttentionParams& p = params.forward;
    return rows(p.q, seq.start_q, head, seq.seqlen_q, p.head_dim);
  }
  __device__ __forceinline__ Rows dout() const {
    const AttentionParams& p = params.forward;
    if (params.dout.data) return rows(params.dout, seq.start_q, head, seq.seqlen_q, p.head_dim_v);
    return rows(p.q, seq.start_q, head, 0, p.head_dim_v);  // zeros
  }
  __device__ __forceinline__ Rows k() const {
    const AttentionParams& p = params.forward;
    return rows(p.k, seq.start_k, head_kv, seq.seqlen_k, p.head_dim);
  }
  __device__ __forceinline__ Rows v() const {
    const AttentionParams& p = params.forward;
    return rows(p.v, seq.start_k, head_kv, seq.seqlen_k, p.head_dim_v);
  }

  // The tiles of keys that the queries of a tile see, and whether they see one of these keys.
  __device__ __forceinline__ tile::Range key_tiles(int m0) const {
    const int last = min(m0 + kTile, seq.seqlen_q) - 1;
    if (last < m0) return {0, 0};
    return tiles_of(mask.any_row(m0, last), kTile);
  }
  // The tiles of queries that see a key of a tile.
  __device__ __forceinline__ tile::Range query_tiles(int n0) const {
    const int last = min(n0 + kTile, seq.seqlen_k) - 1;
    if (last < n0) return {0, 0};
    const tile::Range queries = {max(mask.column(n0).begin, 0),
                                 min(mask.column(last).end, seq.seqlen_q)};
    return tiles_of(queries, kTile);
  }

  // The score of a query and a key from their product, and what softcap multiplies its gradient by
  // (core/problem/score.h). Not seen: -inf.
  __device__ __forceinline__ float score(float dot, int i, int j, float* factor) const {
    const AttentionParams& p = params.forward;
    const auto cap = static_cast<float>(p.softcap);
    const float capped = softcapped(dot * static_cast<float>(p.softmax_scale), cap,
                                    [](float x) { return tile::tanh(x); });
    if (cap != 0.0f) {
      const float t = capped / cap;
      *factor = 1.0f - t * t;
    }
    float x = capped;
    if (p.alibi_slopes.data) {
      const auto distance = static_cast<float>(mask.position(i) - j);
      x = __fadd_rn(x, -alibi_penalty(slope, distance));
    }
    if (p.bias.data) {
      const std::int64_t at = batch * p.bias.batch_stride + head * p.bias.head_stride +
                              i * p.bias.row_stride + j * p.bias.col_stride;
      with_element(p.bias.dtype, [&](auto element) {
        x += tile::to_float(static_cast<const decltype(element)*>(p.bias.data)[at]);
      });
    }
    if (p.mask.data && !p.mask.data[batch * p.mask.batch_stride + head * p.mask.head_stride +
                                    i * p.mask.row_stride + j * p.mask.col_stride])
      x = -INFINITY;
    return x;
  }
};

// Numbers of a tile of queries and keys that a thread has.
struct Gradients {
  float p[4][4];   // probabilities
  float ds[4][4];  // gradients of the scores
  float dx[4][4];  // of the products q.k times softmax_scale
};

// Turns products q.k, which a thread has written to its places of a tile in shared memory, into
// scores, and writes softcap's factors to `factors`, if there is softcap. The loop is rolled: all
// features for each of 16 numbers would be too much code and take too many registers.
__device__ __forceinline__ void compute_scores(const Head& head, int m0, int n0, float* scores,
                                               float* factors) {
#pragma unroll 1
  for (int at = 0; at < 16; ++at) {
    const int row = thread_row() + at / 4, column = thread_column() + at % 4;
    const int i = m0 + row, j = n0 + column;
    float factor = 1.0f, score = -INFINITY;
    if (i < head.seq.seqlen_q && tile::contains(head.mask.row(i), j))
      score = head.score(scores[row * kLd + column], i, j, &factor);
    scores[row * kLd + column] = score;
    if (factors) factors[row * kLd + column] = factor;
  }
}

// Probabilities and gradients of tile (m0, n0); of pairs that do not see each other they are 0.
// Without `wants_ds` probabilities alone. `smem`: the kernel's.
__device__ __forceinline__ void compute_gradients(Gradients& g, const Head& head, int m0, int n0,
                                                  bool wants_ds, float* smem) {
  float* const staged = smem;
  float* const scores = smem + kStageSize;
  multiply_rows(g.p, head.q(), m0, head.k(), n0, staged);
  write_operand<false>(scores, g.p);
  if (wants_ds) multiply_rows(g.ds, head.dout(), m0, head.v(), n0, staged);
  const bool has_cap = wants_ds && head.params.forward.softcap != 0.0;
  if (has_cap) __syncthreads();  // factors take the place of rows that all have read
  compute_scores(head, m0, n0, scores, has_cap ? staged : nullptr);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int i = m0 + thread_row() + r;
    float lse = i < head.seq.seqlen_q ? head.lse[i] : INFINITY;
    if (lse == -INFINITY) lse = INFINITY;  // sees nothing
    const float delta = head.delta[i];     // 0 in the padding
    const int at = (thread_row() + r) * kLd + thread_column();
    float score[4], factor[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    tile::load(score, scores + at);
    if (has_cap) tile::load(factor, staged + at);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float p = ptx::exp2(tile::less_lse(score[c], lse) * tile::kLog2e);
      g.p[r][c] = p;
      // Where nothing is seen, dout . v does not count, whatever it is.
      g.ds[r][c] = p == 0.0f || !wants_ds ? 0.0f : p * (g.ds[r][c] - delta);
      g.dx[r][c] = g.ds[r][c] * factor[c];
    }
  }
}

}  // namespace dlattn::backward_scalar
