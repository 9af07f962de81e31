#pragma once

#include "core/operations/operand.h"
#include "core/problem/quantized.h"
#include "core/problem/tensor_sizes.h"
#include "dlattn/c.h"
#include "dlattn/forward.h"

namespace dlattn::core {

#define FIELD(kind, name) DLATTN_FIELD(kind, AttentionParams, DlattnAttention, name)

// The optional tensors of Python's functions stand in the order in which those take them.
constexpr Operand kForwardOperands[] = {
    {FIELD(kCount, batch_size)},
    {FIELD(kLength, seqlen_q)},
    {FIELD(kLength, seqlen_k)},
    {FIELD(kCount, num_heads), 1},
    {FIELD(kCount, num_heads_kv), 1},
    {FIELD(kCount, head_dim), 1},
    {DLATTN_FIELD_AS("head_dim of v", kCount, AttentionParams, DlattnAttention, head_dim_v), 1},
    {FIELD(kNumber, total_q)},
    {FIELD(kNumber, total_k)},
    {FIELD(kNumber, page_size)},
    {FIELD(kNumber, num_pages)},
    {FIELD(kNumber, cache_batch_size)},
    {FIELD(kNumber, workspace_bytes)},

    {FIELD(kTensor, q), "BSh d", Elements::kAny, kRequired},
    {FIELD(kTensor, k), "CTg d", Elements::kCached, kRequired},
    {FIELD(kTensor, v), "CTg e", Elements::kCached, kRequired},
    {FIELD(kList, quantized_kv), " m", Elements::kByte},
    {FIELD(kTensor, bias), "bhst", Elements::kAny, kInAll & ~kInKvcache},
    {FIELD(kTensor, mask), "bhst", Elements::kBool, kInAll},
    {FIELD(kTensor, alibi_slopes), "bh", Elements::kFloat32, kInAll},
    {FIELD(kTensor, sinks), "h", Elements::kFloat32, kInAll},
    {FIELD(kTensor, q_descale), "bn", Elements::kFloat32, kInBoth},
    {FIELD(kTensor, k_descale), "bg", Elements::kFloat32, kInBoth | kInKvcache},
    {FIELD(kTensor, v_descale), "bg", Elements::kFloat32, kInBoth | kInKvcache},
    {FIELD(kList, cu_seqlens_q), " o", Elements::kInt32},
    {FIELD(kList, cu_seqlens_k), " o", Elements::kInt32},
    {FIELD(kList, seqused_k), " b", Elements::kInt32},
    {FIELD(kList, cache_batch_idx), " b", Elements::kInt32},
    {FIELD(kList, leftpad_k), " b", Elements::kInt32},
    {DLATTN_FIELD_OF_CPP(kTensor, AttentionParams, page_table), "b p", Elements::kInt32},

    {FIELD(kTensor, out), "BSh e", Elements::kAny, kRequired | kWritten},
    {FIELD(kTensor, lse), "Bh S", Elements::kFloat32, kWritten},
    {FIELD(kList, workspace), " w", Elements::kByte, kWritten},
};
#undef FIELD

inline Operands operands_of(const AttentionParams&) {
  return kForwardOperands;
}

inline Sizes sizes_of(const AttentionParams& p) {
  const TensorSizes queries = query_sizes(p), keys = key_sizes(p);
  Sizes sizes;
  sizes['b'] = p.batch_size, sizes['o'] = p.batch_size + 1;
  sizes['s'] = p.seqlen_q, sizes['t'] = p.seqlen_k;
  sizes['h'] = p.num_heads, sizes['g'] = p.num_heads_kv;
  sizes['n'] = p.num_heads / p.heads_per_q_descale;
  sizes['d'] = p.head_dim, sizes['e'] = p.head_dim_v;
  sizes['B'] = queries.batch, sizes['S'] = queries.rows;
  sizes['C'] = keys.batch, sizes['T'] = p.quantized_kv ? 0 : keys.rows;
  sizes['p'] = p.page_table.data ? pages_of(p, p.seqlen_k) : 0;
  sizes['m'] = p.quantized_kv ? quantized_layout(keys_of(p)).bytes : 0;
  sizes['w'] = p.workspace_bytes;
  return sizes;
}

}  // namespace dlattn::core
