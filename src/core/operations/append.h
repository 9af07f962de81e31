#pragma once

#include "core/operations/operand.h"
#include "core/operations/operation.h"
#include "core/problem/append.h"
#include "dlattn/append.h"
#include "dlattn/c.h"

namespace dlattn {

inline DType dtype_of(const AppendParams& p) {
  return p.k.dtype;
}

namespace cpu {
void append_kv(const AppendParams& params, int num_threads, Poll poll = {});
// Throws UnsupportedError for lists that append_kv() refuses, and for lengths that are more than
// `max_seqlen_k` with the new keys.
void check_lists(const AppendParams& params, std::int64_t max_seqlen_k);
}  // namespace cpu

}  // namespace dlattn

namespace dlattn::core {

void validate(const AppendParams& params);  // validate_append.cpp

#define FIELD(kind, name) DLATTN_FIELD(kind, AppendParams, DlattnAppend, name)

constexpr Operand kAppendOperands[] = {
    {FIELD(kCount, batch_size)},
    {FIELD(kCount, num_heads_kv), 1},
    {FIELD(kCount, head_dim), 1},
    {DLATTN_FIELD_AS("head_dim of v", kCount, AppendParams, DlattnAppend, head_dim_v), 1},
    {FIELD(kNumber, num_heads)},
    {FIELD(kNumber, seqlen_new)},
    {FIELD(kNumber, total_new)},
    {FIELD(kNumber, seqlen_k)},
    {FIELD(kNumber, cache_batch_size)},
    {FIELD(kNumber, page_size)},
    {FIELD(kNumber, num_pages)},
    {FIELD(kNumber, rotary_positions)},
    {FIELD(kNumber, rotary_dim)},

    {FIELD(kTensor, k), "BSg d", Elements::kAny, kRequired},
    {FIELD(kTensor, v), "BSg e", Elements::kAny, kRequired},
    {FIELD(kTensor, q), "BSh d"},
    {FIELD(kTensor, rotary_cos), "R c"},
    {FIELD(kTensor, rotary_sin), "R c"},
    {FIELD(kList, cu_seqlens_q), " o", Elements::kInt32},
    {FIELD(kList, seqused_k), " b", Elements::kInt32},
    {FIELD(kList, cache_batch_idx), " b", Elements::kInt32},
    {FIELD(kList, leftpad_k), " b", Elements::kInt32},
    {FIELD(kList, slots), " m", Elements::kSlots},
    {DLATTN_FIELD_OF_CPP(kTensor, AppendParams, page_table), "b p", Elements::kInt32},
    {FIELD(kTensor, k_descale), "bg", Elements::kFloat32},
    {FIELD(kTensor, v_descale), "bg", Elements::kFloat32},

    {FIELD(kTensor, k_cache), "CTg d", Elements::kCached, kRequired | kWritten},
    {FIELD(kTensor, v_cache), "CTg e", Elements::kCached, kRequired | kWritten},
    {FIELD(kTensor, q_out), "BSh d", Elements::kAny, kRequired | kWritten},
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
