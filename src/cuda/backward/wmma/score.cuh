#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/backward/wmma/sequence.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::backward_wmma {

// The scores of one head of one sequence anew, as the forward pass made them
// (core/problem/score.h). `Visit` calls a function with each of a lane's elements: its value, its
// query and its key. The features of a problem are asked for at run time, once a tile: the branches
// are uniform, and next to the products they cost nothing.
template <typename T>
struct ScoreMod {
  const AttentionParams& params;
  const Shape& shape;
  const SequenceOf& seq;
  std::int64_t bias_start, mask_start;  // of element (batch, head, 0, 0)
  float slope;

  __device__ __forceinline__ ScoreMod(const AttentionParams& p, const Shape& shape,
                                      const SequenceOf& seq, int batch, int head)
      : params(p),
        shape(shape),
        seq(seq),
        bias_start(batch * params.bias.batch_stride + head * params.bias.head_stride),
        mask_start(batch * params.mask.batch_stride + head * params.mask.head_stride),
        slope(tile::alibi_slope(params, {0, head, batch})) {}

  // Scores from products q.k, but for what positions hide. `capped(i, 1 - tanh^2)` gets what
  // softcap multiplies gradients of scores with, by the number of the visit's call.
  template <typename Visit, typename Capped>
  __device__ __forceinline__ void apply(Visit visit, Capped capped) const {
    if (!shape.natural) {
      hide_masked(visit);
      return;
    }
    if (shape.softcap != 0.0f) {
      const float to_cap = shape.softmax_scale * shape.inverse_softcap;
      int i = 0;
      visit([&](float& x, int, int) {
        const float t = tile::tanh(x * to_cap);
        x = shape.softcap * t;
        capped(i++, 1.0f - t * t);
      });
    } else {
      visit([&](float& x, int, int) { x *= shape.softmax_scale; });
    }
    if (params.alibi_slopes.data) {
      visit([&](float& x, int query, int key) {
        x = __fadd_rn(x, -alibi_penalty(slope, static_cast<float>(query + seq.shift - key)));
      });
    }
    if (params.bias.data) {
      if (!all_exist(visit)) {
        add_bias<false, float>(visit);
      } else if (params.bias.dtype == DType::kFloat32) {
        add_bias<true, float>(visit);
      } else {
        add_bias<true, T>(visit);
      }
    }
    hide_masked(visit);
  }

  // The lse that exp2 takes: none where the natural one has been subtracted (tile::less_lse).
  __device__ __forceinline__ float lse_log2(float lse) const {
    return shape.natural_lse ? 0.0f : lse;
  }

 private:
  // Whether the warp's elements are all of queries and keys that exist.
  template <typename Visit>
  __device__ __forceinline__ bool all_exist(Visit visit) const {
    int last_query = 0, last_key = 0;
    visit([&](float&, int query, int key) {
      last_query = max(last_query, query), last_key = max(last_key, key);
    });
    return __all_sync(tile::kFullMask, last_query < seq.seqlen_q && last_key < seq.seqlen_k);
  }

  // kAll: all elements exist, and the bias is of Number. Then nothing branches, and loads are in
  // flight together.
  template <bool kAll, typename Number, typename Visit>
  __device__ __forceinline__ void add_bias(Visit visit) const {
    visit([&](float& x, int query, int key) {
      if (!kAll && (query >= seq.seqlen_q || key >= seq.seqlen_k)) return;
      const std::int64_t at =
          bias_start + query * params.bias.row_stride + key * params.bias.col_stride;
      x += kAll || params.bias.dtype == DType::kFloat32
               ? tile::to_float(static_cast<const Number*>(params.bias.data)[at])
               : tile::to_float(static_cast<const T*>(params.bias.data)[at]);
    });
  }

  template <typename Visit>
  __device__ __forceinline__ void hide_masked(Visit visit) const {
    if (!params.mask.data) return;
    visit([&](float& x, int query, int key) {
      if (query >= seq.seqlen_q || key >= seq.seqlen_k) return;
      if (!params.mask
               .data[mask_start + query * params.mask.row_stride + key * params.mask.col_stride])
        x = -INFINITY;
    });
  }
};

}  // namespace dlattn::backward_wmma
