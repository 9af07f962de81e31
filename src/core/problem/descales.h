#pragma once

#include <cstdint>
#include <limits>

#include "core/util/inline.h"
#include "dlattn/forward.h"

// The factors of 8-bit elements: their one definition, for the CPU backend, kernels and the
// reference of their tests.
namespace dlattn {

struct Descales {
  float scores;  // factor of q.k, before softmax_scale; NaN where a descale may not be what it is
  float v;       // factor of out
};

template <typename Index>
DLATTN_SHARED float descale(const BasicTensorView<const float>& x, Index batch, Index head) {
  return x.data ? x.data[batch * x.batch_stride + head * x.head_stride] : 1.0f;
}

// Those of query head `head`, which reads KV head `head_kv`, in batch entry or sequence `batch`.
// The softmax of kernels takes scores' order for the products', so no factor of these may be
// negative.
template <typename Index>
DLATTN_SHARED Descales descales_of(const AttentionParams& p, Index batch, Index head,
                                   Index head_kv) {
  const Index head_q = p.heads_per_q_descale == 1 ? head : head_kv;
  const float q = descale(p.q_descale, batch, head_q), k = descale(p.k_descale, batch, head_kv);
  const bool accepted = q >= 0.0f && k >= 0.0f;
  return {accepted ? q * k : std::numeric_limits<float>::quiet_NaN(),
          descale(p.v_descale, batch, head_kv)};
}

}  // namespace dlattn
