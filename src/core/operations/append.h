#pragma once

#include "core/append.h"
#include "core/operations/operand.h"
#include "dlattn/append.h"
#include "dlattn/c.h"

namespace dlattn::core {

#define FIELD(kind, name) DLATTN_FIELD(kind, AppendParams, DlattnAppend, name)

constexpr Operand kAppendOperands[] = {
    FIELD(kCount, batch_size),
    FIELD(kCount, num_heads_kv).at_least(1),
    FIELD(kCount, head_dim).at_least(1),
    FIELD(kCount, head_dim_v).called("head_dim of v").at_least(1),
    FIELD(kNumber, num_heads),
    FIELD(kNumber, seqlen_new),
    FIELD(kNumber, total_new),
    FIELD(kNumber, seqlen_k),
    FIELD(kNumber, cache_batch_size),
    FIELD(kNumber, page_size),
    FIELD(kNumber, num_pages),
    FIELD(kNumber, rotary_positions),
    FIELD(kNumber, rotary_dim),

    FIELD(kTensor, k).with("BSg d").required(),
    FIELD(kTensor, v).with("BSg e").required(),
    FIELD(kTensor, q).with("BSh d"),
    FIELD(kTensor, rotary_cos).with("R c"),
    FIELD(kTensor, rotary_sin).with("R c"),
    FIELD(kList, cu_seqlens_q).with(" o", Elements::kInt32),
    FIELD(kList, seqused_k).with(" b", Elements::kInt32),
    FIELD(kList, cache_batch_idx).with(" b", Elements::kInt32),
    FIELD(kList, leftpad_k).with(" b", Elements::kInt32),
    FIELD(kList, slots).with(" m", Elements::kSlots),
    DLATTN_FIELD_OF_CPP(kTensor, AppendParams, page_table).with("b p", Elements::kInt32),
    FIELD(kTensor, k_descale).with("bg", Elements::kFloat32),
    FIELD(kTensor, v_descale).with("bg", Elements::kFloat32),

    FIELD(kTensor, k_cache).with("CTg d", Elements::kCached).written(Access::kModify).required(),
    FIELD(kTensor, v_cache).with("CTg e", Elements::kCached).written(Access::kModify).required(),
    FIELD(kTensor, q_out).with("BSh d").written(Access::kModify).required(),
};
#undef FIELD

inline Operands operands_of(const AppendParams&) {
  return kAppendOperands;
}

inline Sizes sizes_of(const AppendParams& p) {
  const TensorSizes rows = new_sizes(p, p.num_heads_kv), cached = cache_sizes(p);
  Sizes sizes;
  sizes['b'] = p.batch_size, sizes['o'] = p.batch_size + 1;
  sizes['B'] = rows.batch, sizes['S'] = rows.rows;
  sizes['C'] = cached.batch, sizes['T'] = cached.rows;
  sizes['g'] = p.num_heads_kv, sizes['h'] = p.q.data ? p.num_heads : 0;
  sizes['d'] = p.head_dim, sizes['e'] = p.head_dim_v;
  sizes['R'] = p.rotary_positions, sizes['c'] = p.rotary_dim / 2;
  sizes['p'] = p.page_table.data ? (p.seqlen_k + p.page_size - 1) / p.page_size : 0;
  sizes['m'] = num_new_rows(p), sizes['x'] = p.slot_bytes;
  return sizes;
}

}  // namespace dlattn::core
