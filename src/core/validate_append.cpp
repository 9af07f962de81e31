// Checks append_kv()'s parameters before anything is launched.
#include "core/append.h"
#include "core/call_memory.h"
#include "core/checks.h"
#include "core/fail.h"
#include "core/validate.h"

namespace dlattn::core {
namespace {

bool is_8_bit(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kFloat8E4M3;
}

// A tensor of the call, as its memory is checked.
struct Named {
  const char* name;
  const void* data;
  DType dtype;
  TensorSizes sizes;
  std::int64_t columns;
  std::int64_t strides[3];  // of sizes' dimensions

  bool empty() const { return sizes.batch * sizes.rows == 0; }
};

template <typename T>
Named named(const char* name, const BasicTensorView<T>& x, const TensorSizes& sizes,
            std::int64_t columns) {
  return {name, x.data, x.dtype, sizes, columns, {x.batch_stride, x.row_stride, x.head_stride}};
}

void check_input(const Named& x) {
  check_elements(x.name, x.sizes, x.columns);
  if (!x.empty() && !x.data) fail(x.name, " is null");
  check_address(x.name, x.data, size_of(x.dtype));
  check_strides(x.name, size_of(x.dtype), x.columns,
                {{"batch", x.sizes.batch, x.strides[0]},
                 {"seqlen", x.sizes.rows, x.strides[1]},
                 {"num_heads", x.sizes.heads, x.strides[2]}});
}

void check_output(const Named& x) {
  check_input(x);
  if (x.empty()) return;
  check_output_layout(x.name, "accepted: at least ", x.columns,
                      {x.sizes.batch, x.sizes.rows, x.sizes.heads},
                      {x.strides[0], x.strides[1], x.strides[2]});
}

void check_enums(const AppendParams& p) {
  check_device_type(p.device.type);
  check_known_dtype("k", p.k.dtype);
  check_known_dtype("v", p.v.dtype);
  check_known_dtype("k_cache", p.k_cache.dtype);
  check_known_dtype("v_cache", p.v_cache.dtype);
}

void check_sizes(const AppendParams& p) {
  check_count("batch_size", p.batch_size, 0);
  check_count("num_heads_kv", p.num_heads_kv, 1);
  check_count("head_dim", p.head_dim, 1);
  check_count("head_dim of v", p.head_dim_v, 1);
  if (p.q.data) check_count("num_heads", p.num_heads, 1);
  if (p.cu_seqlens_q) {
    check_count("total_new", p.total_new, 0);
    if (p.batch_size == 0 && p.total_new > 0) {
      fail("batch_size is 0, by a cu_seqlens_q of one offset, but k has ", p.total_new,
           " tokens; accepted: at least 1 sequence, or a k without tokens");
    }
  } else {
    check_length("seqlen_new", p.seqlen_new, 0);
    check_elements("", "batch_size x seqlen_new", {p.batch_size, p.seqlen_new});
  }
}

// Where rows go.
void check_places(const AppendParams& p) {
  const bool paged = p.page_table.data || p.slots;
  if (p.slots && p.page_table.data)
    fail("page_table is given with slots; accepted: one of them, as slots name pages");
  if (p.cache_batch_idx && paged) {
    fail("cache_batch_idx is given with ", p.slots ? "slots" : "page_table",
         "; accepted: none, as pages have no entries");
  }
  if (p.slots && p.slot_bytes != 4 && p.slot_bytes != 8) {
    fail("slot_bytes is ", p.slot_bytes, "; accepted: 4 (int32) or 8 (int64)");
  }
  if (paged) {
    check_length("page_size", p.page_size, 1);
    check_length("num_pages", p.num_pages, 0);
    check_elements("", "num_pages x page_size", {p.num_pages, p.page_size});
  }
  if (!p.slots) {
    check_length("seqlen_k", p.seqlen_k, 0);
    if (!p.seqused_k && num_new_rows(p) > 0)
      fail("seqused_k is null; accepted: the lengths before the call, or slots");
  }
  if (!p.slots && !p.cu_seqlens_q && p.batch_size > 0 && p.seqlen_new > p.seqlen_k) {
    fail("seqlen_new is ", p.seqlen_new, "; accepted: up to ", p.seqlen_k,
         ", the keys that a sequence has room for");
  }
  if (p.cache_batch_idx) check_length("cache_batch_size", p.cache_batch_size, 0);
  if (p.page_table.data) {
    check_strides("page_table", sizeof(std::int32_t), (p.seqlen_k + p.page_size - 1) / p.page_size,
                  {{"batch", p.batch_size, p.page_table.batch_stride}});
  }
  check_address("cu_seqlens_q", p.cu_seqlens_q, sizeof(std::int32_t));
  check_address("seqused_k", p.seqused_k, sizeof(std::int32_t));
  check_address("cache_batch_idx", p.cache_batch_idx, sizeof(std::int32_t));
  check_address("leftpad_k", p.leftpad_k, sizeof(std::int32_t));
  check_address("page_table", p.page_table.data, sizeof(std::int32_t));
  if (p.slots) check_address("slots", p.slots, p.slot_bytes);
}

void check_rotary(const AppendParams& p) {
  const bool given = p.rotary_cos.data || p.rotary_sin.data;
  if (!given) {
    const char* const alone = p.q.data             ? "q"
                              : p.leftpad_k        ? "leftpad_k"
                              : p.q_fixed_position ? "q_fixed_position"
                                                   : nullptr;
    if (alone) fail(alone, " is given without rotary_cos and rotary_sin; accepted: with both");
    return;
  }
  if (!p.rotary_cos.data || !p.rotary_sin.data) {
    fail(p.rotary_cos.data ? "rotary_sin" : "rotary_cos",
         " is null; accepted: both tables or none");
  }
  if (p.rotary_dim < 2 || p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim) {
    fail("rotary_dim is ", p.rotary_dim,
         ", twice the columns of rotary_cos; accepted: even, 2 to head_dim = ", p.head_dim);
  }
  if (p.rotary_cos.dtype != p.k.dtype && p.rotary_cos.dtype != DType::kFloat32) {
    fail("rotary_cos: dtype is ", to_string(p.rotary_cos.dtype),
         "; accepted: ", to_string(p.k.dtype), ", that of k, or float32");
  }
  if (p.rotary_sin.dtype != p.rotary_cos.dtype) {
    fail("rotary_sin: dtype is ", to_string(p.rotary_sin.dtype),
         "; accepted: ", to_string(p.rotary_cos.dtype), ", that of rotary_cos");
  }
  check_length("rotary_positions", p.rotary_positions, 0);
  if (!p.slots && p.rotary_positions < p.seqlen_k) {
    fail("rotary_cos has ", p.rotary_positions, " rows; accepted: at least ", p.seqlen_k,
         ", the keys that the cache has room for");
  }
  if (!p.seqused_k && num_new_rows(p) > 0) {
    fail(
        "rotary_cos is given with slots and without seqused_k; accepted: with seqused_k, which "
        "tells the positions");
  }
}

void check_dtypes(const AppendParams& p) {
  if (is_8_bit(p.k.dtype)) {
    fail("k: dtype is ", to_string(p.k.dtype), "; accepted: float16, bfloat16, float32, float64");
  }
  const auto check_same = [&](const char* name, DType dtype) {
    if (dtype == p.k.dtype) return;
    fail(name, ": dtype is ", to_string(dtype), "; accepted: ", to_string(p.k.dtype),
         ", that of k");
  };
  check_same("v", p.v.dtype);
  if (p.q.data) {
    check_same("q", p.q.dtype);
    check_same("q_out", p.q_out.dtype);
  }
  const bool rounds = p.k.dtype != DType::kFloat64;  // to 8 bits, in fp32
  if (p.k_cache.dtype != p.k.dtype && !(rounds && is_8_bit(p.k_cache.dtype))) {
    fail("k_cache: dtype is ", to_string(p.k_cache.dtype), "; accepted: ", to_string(p.k.dtype),
         ", that of k", rounds ? ", int8 or float8_e4m3fn" : "");
  }
  if (p.v_cache.dtype != p.k_cache.dtype) {
    fail("v_cache: dtype is ", to_string(p.v_cache.dtype),
         "; accepted: ", to_string(p.k_cache.dtype), ", that of k_cache");
  }
}

void check_scales(const AppendParams& p) {
  const struct {
    const char* name;
    const BasicTensorView<const float>& view;
    const char* cache;
  } scales[] = {{"k_descale", p.k_descale, "k_cache"}, {"v_descale", p.v_descale, "v_cache"}};
  for (const auto& scale : scales) {
    const bool needed = is_8_bit(p.k_cache.dtype);
    if (needed == (scale.view.data != nullptr)) {
      if (!needed) continue;
      check_address(scale.name, scale.view.data, sizeof(float));
      if ((p.batch_size > 1 && scale.view.batch_stride < 0) ||
          (p.num_heads_kv > 1 && scale.view.head_stride < 0)) {
        fail(scale.name, ": a stride is negative; accepted: strides of at least 0");
      }
      check_span(scale.name, sizeof(float), 1,
                 {{"batch", p.batch_size, scale.view.batch_stride},
                  {"num_heads", p.num_heads_kv, scale.view.head_stride}});
    } else if (needed) {
      fail(scale.name, " is null with ", scale.cache, " of ", to_string(p.k_cache.dtype),
           "; accepted: a float32 tensor on its device");
    } else {
      fail(scale.name, " is given with ", scale.cache, " of ", to_string(p.k_cache.dtype),
           "; accepted: none");
    }
  }
}

void check_memory(const AppendParams& p) {
  const TensorSizes keys = new_sizes(p, p.num_heads_kv), queries = new_sizes(p, p.num_heads);
  const TensorSizes cached = cache_sizes(p);
  const Named k = named("k", p.k, keys, p.head_dim), v = named("v", p.v, keys, p.head_dim_v);
  const Named q = named("q", p.q, queries, p.head_dim);
  const Named k_cache = named("k_cache", p.k_cache, cached, p.head_dim);
  const Named v_cache = named("v_cache", p.v_cache, cached, p.head_dim_v);
  const Named q_out = named("q_out", p.q_out, queries, p.head_dim);
  const TensorSizes table = {1, p.rotary_positions, 1};
  const Named cos = named("rotary_cos", p.rotary_cos, table, p.rotary_dim / 2);
  const Named sin = named("rotary_sin", p.rotary_sin, table, p.rotary_dim / 2);
  const bool rotates = p.rotary_cos.data, has_q = p.q.data;
  check_input(k), check_input(v);
  check_output(k_cache), check_output(v_cache);
  if (rotates) check_input(cos), check_input(sin);
  if (has_q) check_input(q), check_output(q_out);
  check_own_memory(p);
}

}  // namespace

void validate(const AppendParams& p) {
  check_enums(p);
  check_sizes(p);
  check_dtypes(p);
  check_places(p);
  check_scales(p);
  check_rotary(p);
  check_memory(p);
}

}  // namespace dlattn::core
