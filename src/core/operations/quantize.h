#pragma once

#include "core/operations/operand.h"
#include "core/problem/quantized.h"
#include "dlattn/c.h"
#include "dlattn/quantize.h"

namespace dlattn::core {

#define FIELD(kind, name) DLATTN_FIELD(kind, QuantizeParams, DlattnQuantize, name)

constexpr Operand kQuantizeOperands[] = {
    {FIELD(kCount, batch_size)},
    {FIELD(kLength, seqlen_k)},
    {FIELD(kCount, num_heads_kv), 1},
    {FIELD(kCount, head_dim), 1},
    {DLATTN_FIELD_AS("head_dim of v", kCount, QuantizeParams, DlattnQuantize, head_dim_v), 1},
    {FIELD(kCount, total_k)},

    {FIELD(kTensor, k), "CTg d", Elements::kAny, kRequired},
    {FIELD(kTensor, v), "CTg e", Elements::kAny, kRequired},
    {FIELD(kList, cu_seqlens_k), " o", Elements::kInt32},
    {FIELD(kList, seqused_k), " b", Elements::kInt32},

    {FIELD(kList, quantized_kv), " m", Elements::kByte, kRequired | kWritten},
};
#undef FIELD

inline Operands operands_of(const QuantizeParams&) {
  return kQuantizeOperands;
}

inline Sizes sizes_of(const QuantizeParams& p) {
  Sizes sizes;
  sizes['b'] = p.batch_size, sizes['o'] = p.batch_size + 1;
  sizes['C'] = p.cu_seqlens_k ? 1 : p.batch_size;
  sizes['T'] = p.cu_seqlens_k ? p.total_k : p.seqlen_k;
  sizes['g'] = p.num_heads_kv, sizes['d'] = p.head_dim, sizes['e'] = p.head_dim_v;
  sizes['m'] = sizes['C'] > 0 && sizes['T'] > 0 ? quantized_layout(p).bytes : 0;
  return sizes;
}

}  // namespace dlattn::core
