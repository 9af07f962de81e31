// Checks append_kv()'s parameters before anything is launched.
#include "core/operations/append.h"
#include "core/operations/tensors.h"
#include "core/problem/append.h"
#include "core/validate/call_memory.h"
#include "core/validate/checks.h"
#include "core/validate/fail.h"
#include "core/validate/validate.h"

namespace dlattn::core {
namespace {

bool is_8_bit(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kFloat8E4M3;
}

void check_enums(const AppendParams& p) {
  check_device_type(p.device.type);
  check_known_dtype("k", p.k.dtype);
  check_known_dtype("v", p.v.dtype);
  check_known_dtype("k_cache", p.k_cache.dtype);
  check_known_dtype("v_cache", p.v_cache.dtype);
}

void check_sizes(const AppendParams& p) {
  check_sizes(operands_of(p), &p);
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
      if ((p.batch_size > 1 && scale.view.batch_stride < 0) ||
          (p.num_heads_kv > 1 && scale.view.head_stride < 0)) {
        fail(scale.name, ": a stride is negative; accepted: strides of at least 0");
      }
    } else if (needed) {
      fail(scale.name, " is null with ", scale.cache, " of ", to_string(p.k_cache.dtype),
           "; accepted: a float32 tensor on its device");
    } else {
      fail(scale.name, " is given with ", scale.cache, " of ", to_string(p.k_cache.dtype),
           "; accepted: none");
    }
  }
}

}  // namespace

void validate(const AppendParams& p) {
  check_enums(p);
  check_sizes(p);
  check_dtypes(p);
  check_places(p);
  check_scales(p);
  check_rotary(p);
  const Operands table = operands_of(p);
  const Sizes sizes = sizes_of(p);
  const GivenTensors tensors(table, &p, sizes);
  check_elements(tensors);
  check_given(tensors);
  check_layouts(tensors);
  check_own_memory(p, tensors);
}

}  // namespace dlattn::core
