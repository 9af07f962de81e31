#pragma once

#include <cstdint>
#include <type_traits>

#include "core/problem/positions.h"
#include "core/util/inline.h"
#include "cuda/forward/wmma/traits.h"
#include "cuda/plan/launch_shape.h"
#include "dlattn/forward.h"

// Packed heads (pack_gqa): the query heads of one KV head become rows of the same tiles, so that K
// and V are read once for all of them, and few queries fill a tile. Plain C++, shared by the plan,
// the launcher and the tests that run kernels on the CPU.
namespace dlattn::wmma {

// Query heads per KV head.
inline std::int64_t group_size(const AttentionParams& p) {
  return p.num_heads / p.num_heads_kv;
}

// Whether strides alone can describe the heads of a group as rows of one head, to any kernel. There
// must be one query, so that all rows see the same keys, and nothing that a kernel reads per head.
inline bool heads_fold_into_rows(const AttentionParams& p) {
  return p.seqlen_q == 1 && !p.cu_seqlens_q && !p.sinks.data && !p.alibi_slopes.data &&
         (!p.lse.data || p.lse.head_stride == 1);
}

// The problem with the KV heads as heads and the query heads of a group as rows. The keys that the
// one query sees are a range. The folded problem has these keys alone, and no mask by position.
inline AttentionParams folded_heads(const AttentionParams& p) {
  const std::int64_t group = group_size(p);
  AttentionParams folded = p;
  folded.seqlen_q = group;
  folded.num_heads = p.num_heads_kv;
  folded.q.row_stride = p.q.head_stride;
  folded.q.head_stride *= group;
  folded.out.row_stride = p.out.head_stride;
  folded.out.head_stride *= group;
  folded.lse.head_stride = group;
  folded.bias.row_stride = p.bias.head_stride;
  folded.bias.head_stride *= group;
  folded.mask.row_stride = p.mask.head_stride;
  folded.mask.head_stride *= group;

  const std::int64_t shift = position_shift(p.causal, p.seqlen_q, p.seqlen_k);
  const PositionMask<std::int64_t> mask(window_of<std::int64_t>(p), shift, p.seqlen_k);
  const Range<std::int64_t> keys = mask.row(0);
  folded.causal = Causal::kNone;
  folded.window_left = folded.window_right = -1;
  folded.seqlen_k = greater<std::int64_t>(keys.end - keys.begin, 0);
  const auto skip = [keys](const auto*& data, std::int64_t stride, std::int64_t bytes) {
    if (!data) return;
    data = reinterpret_cast<std::decay_t<decltype(data)>>(
        reinterpret_cast<std::uintptr_t>(data) +
        static_cast<std::uintptr_t>(keys.begin * stride * bytes));
  };
  skip(folded.k.data, p.k.row_stride, size_of(p.q.dtype));
  skip(folded.v.data, p.v.row_stride, size_of(p.q.dtype));
  skip(folded.bias.data, p.bias.col_stride, size_of(p.bias.dtype));
  skip(folded.mask.data, p.mask.col_stride, sizeof *p.mask.data);
  return folded;
}

// Calls launch(params, shape) with the parameters of the kernel for a problem and its plan.
template <typename Launch>
void with_folded_heads(const AttentionParams& p, const Plan& plan, Launch launch) {
  if (plan.packed_heads == 1 || packs_heads(plan.variant)) {
    launch(p, make_launch_shape(p, plan, plan.packed_heads));
  } else {
    const AttentionParams folded = folded_heads(p);
    launch(folded, make_launch_shape(folded, plan));
  }
}

}  // namespace dlattn::wmma
