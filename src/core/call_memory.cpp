// The tensors of a call: every operation has one list of what it reads and one of what it writes.
#include "core/call_memory.h"

#include <string_view>

#include "core/append.h"
#include "core/fail.h"
#include "core/overlap.h"
#include "core/quantized.h"
#include "core/tensor_sizes.h"

namespace dlattn::core {
namespace {

struct Named {
  const char* name;
  Region region;
};

// The tensors that a call writes.
struct Written {
  Named tensors[3];
  int count = 0;

  void add(const char* name, const Region& region) { tensors[count++] = {name, region}; }
  const Named* begin() const { return tensors; }
  const Named* end() const { return tensors + count; }
};

void check_apart(const Named& written, const Named& other) {
  if (disjoint(written.region, other.region)) return;
  fail(written.name, " shares memory with ", other.name,
       "; accepted: memory of its own, or a slice of the same buffer whose strides show that it "
       "has no element in common");
}

// The memory of [batch][rows][heads] runs of `columns` elements, of [batch][heads] runs of rows, of
// [batch][heads] numbers and of `count` numbers side by side.
template <typename T>
Region rows_region(const BasicTensorView<T>& x, const TensorSizes& sizes, std::int64_t columns) {
  return {x.data,
          size_of(x.dtype),
          columns,
          {sizes.batch, sizes.rows, sizes.heads, 1},
          {x.batch_stride, x.row_stride, x.head_stride, 0}};
}
Region lse_region(const BasicTensorView<float>& lse, const TensorSizes& sizes) {
  return {lse.data,
          4,
          sizes.rows,
          {sizes.batch, sizes.heads, 1, 1},
          {lse.batch_stride, lse.head_stride, 0, 0}};
}
Region heads_region(const BasicTensorView<const float>& x, std::int64_t batch, std::int64_t heads) {
  return {x.data, 4, 1, {batch, heads, 1, 1}, {x.batch_stride, x.head_stride, 0, 0}};
}
Region flat_region(const void* data, std::int64_t element_bytes, std::int64_t count) {
  return {data, element_bytes, count, {1, 1, 1, 1}, {}};
}
template <typename T>
Region scores_region(const BasicTensorView<T>& x, std::int64_t element_bytes,
                     const AttentionParams& p) {
  return {x.data,
          element_bytes,
          1,
          {p.batch_size, p.num_heads, p.seqlen_q, p.seqlen_k},
          {x.batch_stride, x.head_stride, x.row_stride, x.col_stride}};
}
Region table_region(const BasicTensorView<const std::int32_t>& table, std::int64_t batch,
                    std::int64_t pages) {
  return {table.data, 4, pages, {batch, 1, 1, 1}, {table.batch_stride, 0, 0, 0}};
}

// visit({name, region}) for each tensor that the call reads and that is given.

template <typename Visit>
void for_each_read(const AttentionParams& p, const Visit& visit) {
  const TensorSizes queries = query_sizes(p), keys = key_sizes(p);
  const auto read = [&](const char* name, const Region& region) {
    if (region.data) visit(Named{name, region});
  };
  const auto read_list = [&](const char* name, const std::int32_t* list, std::int64_t count) {
    if (list) visit(Named{name, flat_region(list, 4, count)});
  };
  read("q", rows_region(p.q, queries, p.head_dim));
  if (p.quantized_kv) {
    read("quantized_kv", flat_region(p.quantized_kv, 1, quantized_layout(keys_of(p)).bytes));
  } else {
    read("k", rows_region(p.k, keys, p.head_dim));
    read("v", rows_region(p.v, keys, p.head_dim_v));
  }
  if (p.bias.data) read("bias", scores_region(p.bias, size_of(p.bias.dtype), p));
  if (p.mask.data) read("mask", scores_region(p.mask, 1, p));
  read("alibi_slopes", heads_region(p.alibi_slopes, p.batch_size, p.num_heads));
  read("sinks", heads_region(p.sinks, 1, p.num_heads));
  read("q_descale", heads_region(p.q_descale, p.batch_size, p.num_heads / p.heads_per_q_descale));
  read("k_descale", heads_region(p.k_descale, p.batch_size, p.num_heads_kv));
  read("v_descale", heads_region(p.v_descale, p.batch_size, p.num_heads_kv));
  read_list("cu_seqlens_q", p.cu_seqlens_q, p.batch_size + 1);
  read_list("cu_seqlens_k", p.cu_seqlens_k, p.batch_size + 1);
  read_list("seqused_k", p.seqused_k, p.batch_size);
  read_list("cache_batch_idx", p.cache_batch_idx, p.batch_size);
  read_list("leftpad_k", p.leftpad_k, p.batch_size);
  if (p.page_table.data)
    read("page_table", table_region(p.page_table, p.batch_size, pages_of(p, p.seqlen_k)));
}

template <typename Visit>
void for_each_read(const AppendParams& p, const Visit& visit) {
  const TensorSizes keys = new_sizes(p, p.num_heads_kv);
  const auto read = [&](const char* name, const Region& region) {
    if (region.data) visit(Named{name, region});
  };
  const auto read_list = [&](const char* name, const void* list, std::int64_t bytes) {
    if (list) visit(Named{name, flat_region(list, 1, bytes)});
  };
  read("k", rows_region(p.k, keys, p.head_dim));
  read("v", rows_region(p.v, keys, p.head_dim_v));
  read("q", rows_region(p.q, new_sizes(p, p.num_heads), p.head_dim));
  const TensorSizes table = {1, p.rotary_positions, 1};
  read("rotary_cos", rows_region(p.rotary_cos, table, p.rotary_dim / 2));
  read("rotary_sin", rows_region(p.rotary_sin, table, p.rotary_dim / 2));
  read_list("cu_seqlens_q", p.cu_seqlens_q, 4 * (p.batch_size + 1));
  read_list("seqused_k", p.seqused_k, 4 * p.batch_size);
  read_list("cache_batch_idx", p.cache_batch_idx, 4 * p.batch_size);
  read_list("leftpad_k", p.leftpad_k, 4 * p.batch_size);
  read_list("slots", p.slots, p.slot_bytes * num_new_rows(p));
  if (p.page_table.data) {
    const std::int64_t pages = (p.seqlen_k + p.page_size - 1) / p.page_size;
    read("page_table", table_region(p.page_table, p.batch_size, pages));
  }
  read("k_descale", heads_region(p.k_descale, p.batch_size, p.num_heads_kv));
  read("v_descale", heads_region(p.v_descale, p.batch_size, p.num_heads_kv));
}

template <typename Visit>
void for_each_read(const MergeParams& p, const Visit& visit) {
  const TensorSizes sizes = {p.batch_size, p.seqlen_q, p.num_heads};
  for (int n = 0; n < p.num_states; ++n) {
    visit(Named{"outs", rows_region(p.outs[n], sizes, p.head_dim_v)});
    const auto& lse = p.lses[n];
    visit(Named{"lses",
                {lse.data,
                 4,
                 1,
                 {p.batch_size, p.num_heads, p.seqlen_q, 1},
                 {lse.batch_stride, lse.head_stride, lse.row_stride, 0}}});
  }
}

template <typename Visit>
void for_each_read(const QuantizeParams& p, const Visit& visit) {
  const TensorSizes keys = p.cu_seqlens_k ? TensorSizes{1, p.total_k, p.num_heads_kv}
                                          : TensorSizes{p.batch_size, p.seqlen_k, p.num_heads_kv};
  visit(Named{"k", rows_region(p.k, keys, p.head_dim)});
  visit(Named{"v", rows_region(p.v, keys, p.head_dim_v)});
  if (p.cu_seqlens_k)
    visit(Named{"cu_seqlens_k", flat_region(p.cu_seqlens_k, 4, p.batch_size + 1)});
  if (p.seqused_k) visit(Named{"seqused_k", flat_region(p.seqused_k, 4, p.batch_size)});
}

Named workspace_memory(const AttentionParams& p) {
  return {"workspace", flat_region(p.workspace, 1, p.workspace_bytes)};
}

Written results_of(const AttentionParams& p) {
  Written written;
  written.add("out", rows_region(p.out, query_sizes(p), p.head_dim_v));
  if (p.lse.data) written.add("lse", lse_region(p.lse, query_sizes(p)));
  return written;
}

Written written_by(const AttentionParams& p) {
  Written written = results_of(p);
  if (p.workspace) written.tensors[written.count++] = workspace_memory(p);
  return written;
}

Written written_by(const MergeParams& p) {
  const TensorSizes sizes = {p.batch_size, p.seqlen_q, p.num_heads};
  Written written;
  written.add("out", rows_region(p.out, sizes, p.head_dim_v));
  written.add("lse", lse_region(p.lse, sizes));
  return written;
}

Written written_by(const QuantizeParams& p) {
  Written written;
  written.add("quantized_kv", flat_region(p.quantized_kv, 1, quantized_layout(p).bytes));
  return written;
}

Written written_by(const AppendParams& p) {
  Written written;
  written.add("k_cache", rows_region(p.k_cache, cache_sizes(p), p.head_dim));
  written.add("v_cache", rows_region(p.v_cache, cache_sizes(p), p.head_dim_v));
  if (p.q.data) written.add("q_out", rows_region(p.q_out, new_sizes(p, p.num_heads), p.head_dim));
  return written;
}

// Pairs of a call that may share memory all the same.
template <typename Params>
bool may_share(const Params&, const Named&, const Named&) {
  return false;
}

// Whether an output is its input.
bool is_in_place(const Region& a, const Region& b) {
  bool same = a.data == b.data;
  for (int dim = 0; dim < 4; ++dim) same &= a.sizes[dim] <= 1 || a.strides[dim] == b.strides[dim];
  return same;
}

bool may_share(const AppendParams& p, const Named& written, const Named& other) {
  const std::string_view a = written.name, b = other.name;
  // Views of one pool may overlap in pages: which of these are keys, the table and the slots tell.
  if (a == "k_cache" && b == "v_cache")
    return (p.page_table.data || p.slots) && p.k_cache.data != p.v_cache.data;
  return a == "q_out" && b == "q" && is_in_place(written.region, other.region);
}

template <typename Params>
void check_call(const Params& p) {
  const Written written = written_by(p);
  for (const Named& a : written) {
    for (const Named* b = &a + 1; b < written.end(); ++b) {
      if (!may_share(p, a, *b)) check_apart(a, *b);
    }
  }
  for_each_read(p, [&](const Named& input) {
    for (const Named& output : written) {
      if (!may_share(p, output, input)) check_apart(output, input);
    }
  });
}

}  // namespace

void check_own_memory(const AttentionParams& params) {
  check_call(params);
}
void check_own_memory(const MergeParams& params) {
  check_call(params);
}
void check_own_memory(const QuantizeParams& params) {
  check_call(params);
}
void check_own_memory(const AppendParams& params) {
  check_call(params);
}

void check_own_memory(const AppendParams& append, const AttentionParams& attention) {
  const Written by_append = written_by(append), by_attention = written_by(attention);
  for (const Named& output : by_attention) {
    for_each_read(append, [&](const Named& input) { check_apart(output, input); });
    for (const Named& other : by_append) check_apart(output, other);
  }
  for_each_read(attention, [&](const Named& input) {
    const std::string_view name = input.name;
    const bool is_appended = name == "k" || name == "v" || (name == "q" && append.q.data);
    if (is_appended) return;
    for (const Named& output : by_append) check_apart(output, input);
  });
}

void check_workspace_memory(const AttentionParams& params) {
  const Named workspace = workspace_memory(params);
  for (const Named& output : results_of(params)) check_apart(workspace, output);
  for_each_read(params, [&](const Named& input) { check_apart(workspace, input); });
}

}  // namespace dlattn::core
