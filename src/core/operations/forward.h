#pragma once

#include "core/operations/operand.h"
#include "core/quantized.h"
#include "core/tensor_sizes.h"
#include "dlattn/c.h"
#include "dlattn/forward.h"

namespace dlattn::core {

#define FIELD(kind, name) DLATTN_FIELD(kind, AttentionParams, DlattnAttention, name)

// Tensors with surfaces stand in the order in which Python's functions take them.
constexpr Operand kForwardOperands[] = {
    FIELD(kCount, batch_size),
    FIELD(kLength, seqlen_q),
    FIELD(kLength, seqlen_k),
    FIELD(kCount, num_heads).at_least(1),
    FIELD(kCount, num_heads_kv).at_least(1),
    FIELD(kCount, head_dim).at_least(1),
    FIELD(kCount, head_dim_v).called("head_dim of v").at_least(1),
    FIELD(kNumber, total_q),
    FIELD(kNumber, total_k),
    FIELD(kNumber, page_size),
    FIELD(kNumber, num_pages),
    FIELD(kNumber, cache_batch_size),
    FIELD(kNumber, workspace_bytes),

    FIELD(kTensor, q).with("BSh d").required(),
    FIELD(kTensor, k).with("CTg d", Elements::kCached).required(),
    FIELD(kTensor, v).with("CTg e", Elements::kCached).required(),
    FIELD(kList, quantized_kv).with(" m", Elements::kByte),
    FIELD(kTensor, bias).with("bhst").taken_by(kInAll & ~kInKvcache),
    FIELD(kTensor, mask).with("bhst", Elements::kBool).taken_by(kInAll),
    FIELD(kTensor, alibi_slopes).with("bh", Elements::kFloat32).taken_by(kInAll),
    FIELD(kTensor, sinks).with("h", Elements::kFloat32).taken_by(kInAll),
    FIELD(kTensor, q_descale).with("bn", Elements::kFloat32).taken_by(kInBoth),
    FIELD(kTensor, k_descale).with("bg", Elements::kFloat32).taken_by(kInBoth | kInKvcache),
    FIELD(kTensor, v_descale).with("bg", Elements::kFloat32).taken_by(kInBoth | kInKvcache),
    FIELD(kList, cu_seqlens_q).with(" o", Elements::kInt32),
    FIELD(kList, cu_seqlens_k).with(" o", Elements::kInt32),
    FIELD(kList, seqused_k).with(" b", Elements::kInt32),
    FIELD(kList, cache_batch_idx).with(" b", Elements::kInt32),
    FIELD(kList, leftpad_k).with(" b", Elements::kInt32),
    DLATTN_FIELD_OF_CPP(kTensor, AttentionParams, page_table).with("b p", Elements::kInt32),

    FIELD(kTensor, out).with("BSh e").written().required(),
    FIELD(kTensor, lse).with("Bh S", Elements::kFloat32).written(),
    FIELD(kList, workspace).with(" w", Elements::kByte).written(),
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
