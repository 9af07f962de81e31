#include "core/validate.h"

#include <limits>

#include "core/backend.h"
#include "core/concat.h"
#include "core/overlap.h"

namespace dlattn::core {
namespace {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw UnsupportedError(concat(parts...));
}

// The stride of a dimension of one element is never used, so it may be anything.
void check_stride(const char* name, const char* dim, std::int64_t size, std::int64_t stride) {
  if (size > 1 && stride < 0) {
    fail(name, ": the stride of dimension ", dim, " is ", stride,
         "; negative strides are not accepted");
  }
}

// An output must not map two elements to one address. Strides of an injective layout, sorted, each
// reach past all that the smaller ones span.
void check_output_layout(const char* name, std::int64_t inner, const std::int64_t (&sizes)[3],
                         const std::int64_t (&strides)[3]) {
  std::int64_t extent = inner;
  bool used[3] = {sizes[0] <= 1, sizes[1] <= 1, sizes[2] <= 1};
  for (;;) {
    int next = -1;
    for (int i = 0; i < 3; ++i) {
      if (!used[i] && (next < 0 || strides[i] < strides[next])) next = i;
    }
    if (next < 0) return;
    if (strides[next] < extent) {
      fail(name, ": a stride of ", strides[next],
           " elements makes elements share memory; out needs strides of at least ", extent,
           " there");
    }
    extent += strides[next] * (sizes[next] - 1);
    used[next] = true;
  }
}

void check_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) fail(name, " is ", value, "; accepted: at least ", least);
}

// Wider than any sequence, and small enough that positions can be added to it.
constexpr std::int64_t kMaxWindow = std::int64_t{1} << 40;

void check_window(const char* name, std::int64_t value) {
  if (value < -1 || value > kMaxWindow) {
    fail(name, " is ", value, "; accepted: 0 to ", kMaxWindow, " tokens, or -1 for no limit");
  }
}

void check_sizes(const AttentionParams& p) {
  check_at_least("batch_size", p.batch_size, 0);
  check_at_least("seqlen_q", p.seqlen_q, 0);
  check_at_least("seqlen_k", p.seqlen_k, 0);
  check_at_least("num_heads", p.num_heads, 1);
  check_at_least("num_heads_kv", p.num_heads_kv, 1);
  if (p.num_heads % p.num_heads_kv != 0) {
    fail("k: num_heads_kv = ", p.num_heads_kv, " does not divide num_heads = ", p.num_heads,
         " of q");
  }
  check_at_least("head_dim", p.head_dim, 1);
  check_at_least("head_dim of v", p.head_dim_v, 1);
}

void check_layouts(const AttentionParams& p) {
  const bool varlen = p.cu_seqlens_q != nullptr;
  const std::int64_t batch = varlen ? 1 : p.batch_size;
  const std::int64_t rows_q = varlen ? p.total_q : p.seqlen_q;
  const std::int64_t rows_k = varlen ? p.total_k : p.seqlen_k;
  const struct {
    const char* name;
    std::int64_t rows, heads, batch_stride, row_stride, head_stride;
  } tensors[] = {
      {"q", rows_q, p.num_heads, p.q_batch_stride, p.q_row_stride, p.q_head_stride},
      {"k", rows_k, p.num_heads_kv, p.k_batch_stride, p.k_row_stride, p.k_head_stride},
      {"v", rows_k, p.num_heads_kv, p.v_batch_stride, p.v_row_stride, p.v_head_stride},
  };
  for (const auto& t : tensors) {
    check_stride(t.name, "batch", batch, t.batch_stride);
    check_stride(t.name, "seqlen", t.rows, t.row_stride);
    check_stride(t.name, "num_heads", t.heads, t.head_stride);
  }
  const std::int64_t out_elements = batch * rows_q;
  if (out_elements == 0) return;
  check_output_layout("out", p.head_dim_v, {batch, rows_q, p.num_heads},
                      {p.out_batch_stride, p.out_row_stride, p.out_head_stride});
  if (p.lse) {
    check_output_layout("lse", rows_q, {batch, p.num_heads, 1},
                        {p.lse_batch_stride, p.lse_head_stride, 0});
  }
}

// A GPU faults at an element that lies across its own size, and takes the process' context along.
void check_address(const char* name, const void* address, std::int64_t element_bytes) {
  const std::int64_t past =
      reinterpret_cast<std::intptr_t>(address) & (element_bytes - 1);  // a power of two
  if (past == 0) return;
  fail(name, ": its address is ", past, " byte(s) past a multiple of ", element_bytes,
       "; accepted: multiples of the element's size");
}

void check_addresses(const AttentionParams& p) {
  const std::int64_t bytes = size_of(p.dtype);
  check_address("q", p.q, bytes);
  check_address("k", p.k, bytes);
  check_address("v", p.v, bytes);
  check_address("out", p.out, bytes);
  check_address("lse", p.lse, sizeof(float));
  check_address("bias", p.bias, size_of(p.bias_dtype));
  check_address("alibi_slopes", p.alibi_slopes, sizeof(float));
  check_address("sinks", p.sinks, sizeof(float));
  check_address("cu_seqlens_q", p.cu_seqlens_q, sizeof(std::int32_t));
  check_address("cu_seqlens_k", p.cu_seqlens_k, sizeof(std::int32_t));
  check_address("seqused_k", p.seqused_k, sizeof(std::int32_t));
}

void check_pointers(const AttentionParams& p) {
  const bool varlen = p.cu_seqlens_q != nullptr;
  const std::int64_t rows_q = varlen ? p.total_q : p.batch_size * p.seqlen_q;
  const std::int64_t rows_k = varlen ? p.total_k : p.batch_size * p.seqlen_k;
  if (rows_q == 0) return;
  if (!p.q) fail("q is null");
  if (!p.out) fail("out is null");
  if (rows_k > 0 && !p.k) fail("k is null");
  if (rows_k > 0 && !p.v) fail("v is null");
}

void check_scores(const AttentionParams& p) {
  if (!(p.softmax_scale >= kMinSoftmaxScale && p.softmax_scale <= kMaxSoftmaxScale)) {
    fail("softmax_scale is ", p.softmax_scale, "; accepted: 1.18e-38 to 8.5e37 (2^-126 to 2^126)");
  }
  if (p.softcap != 0.0 && !(p.softcap >= kMinSoftcap && p.softcap <= kMaxSoftcap)) {
    fail("softcap is ", p.softcap,
         "; accepted: 7.9e-31 to 1.27e30 (2^-100 to 2^100), or 0 for none");
  }
  check_window("window left", p.window_left);
  check_window("window right", p.window_right);
  if (p.bias) {
    if (p.bias_dtype != p.dtype && p.bias_dtype != DType::kFloat32) {
      fail("bias: dtype is ", to_string(p.bias_dtype), "; accepted: ",
           p.dtype == DType::kFloat32 ? "" : concat(to_string(p.dtype), " (that of q) or "),
           "float32");
    }
    check_stride("bias", "batch", p.batch_size, p.bias_batch_stride);
    check_stride("bias", "num_heads", p.num_heads, p.bias_head_stride);
    check_stride("bias", "seqlen_q", p.seqlen_q, p.bias_row_stride);
    check_stride("bias", "seqlen_k", p.seqlen_k, p.bias_col_stride);
  }
  if (p.mask) {
    check_stride("mask", "batch", p.batch_size, p.mask_batch_stride);
    check_stride("mask", "num_heads", p.num_heads, p.mask_head_stride);
    check_stride("mask", "seqlen_q", p.seqlen_q, p.mask_row_stride);
    check_stride("mask", "seqlen_k", p.seqlen_k, p.mask_col_stride);
  }
  if (p.alibi_slopes) {
    check_stride("alibi_slopes", "batch", p.batch_size, p.alibi_batch_stride);
    check_stride("alibi_slopes", "num_heads", p.num_heads, p.alibi_head_stride);
  }
  if (p.sinks) check_stride("sinks", "num_heads", p.num_heads, p.sinks_stride);
}

// cu_seqlens count no further, and kernels hold them to it.
void check_pack(const char* name, std::int64_t rows) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  check_at_least(name, rows, 0);
  if (rows > kMost) fail(name, " is ", rows, "; accepted: up to ", kMost);
}

void check_varlen(const AttentionParams& p) {
  if ((p.cu_seqlens_q == nullptr) != (p.cu_seqlens_k == nullptr)) {
    fail(p.cu_seqlens_q ? "cu_seqlens_k" : "cu_seqlens_q", " is null; variable length needs both");
  }
  if (p.seqused_k && !p.cu_seqlens_k) fail("seqused_k needs cu_seqlens_q and cu_seqlens_k");
  if (!p.cu_seqlens_q) return;
  check_pack("total_q", p.total_q);
  check_pack("total_k", p.total_k);
  if (p.batch_size == 0 && p.total_q > 0) {
    fail("batch_size is 0, by a cu_seqlens_q of one offset, but q has ", p.total_q,
         " tokens; accepted: at least 1 sequence, or a q without tokens");
  }
  if (p.device.type == DeviceType::kCpu) cpu::validate_varlen(p);
}

struct Named {
  const char* name;
  Region region;
};

void check_own_memory(const Named& output, const Named& other) {
  if (disjoint(output.region, other.region)) return;
  fail(
      output.name, " shares memory with ", other.name,
      "; accepted: memory of its own, or a slice of the same buffer whose strides show that it has "
      "no element in common");
}

void check_own_memory(const AttentionParams& p) {
  const bool varlen = p.cu_seqlens_q != nullptr;
  const std::int64_t batch = varlen ? 1 : p.batch_size;
  const std::int64_t rows_q = varlen ? p.total_q : p.seqlen_q;
  const std::int64_t rows_k = varlen ? p.total_k : p.seqlen_k;
  const std::int64_t bytes = size_of(p.dtype);
  const Named out = {"out",
                     {p.out,
                      bytes,
                      p.head_dim_v,
                      {batch, rows_q, p.num_heads, 1},
                      {p.out_batch_stride, p.out_row_stride, p.out_head_stride, 0}}};
  const Named lse = {"lse",
                     {p.lse,
                      4,
                      rows_q,
                      {batch, p.num_heads, 1, 1},
                      {p.lse_batch_stride, p.lse_head_stride, 0, 0}}};
  const auto check = [&](const char* name, const Region& input) {
    check_own_memory(out, {name, input});
    if (p.lse) check_own_memory(lse, {name, input});
  };
  if (p.lse) check_own_memory(out, lse);
  check("q", {p.q,
              bytes,
              p.head_dim,
              {batch, rows_q, p.num_heads, 1},
              {p.q_batch_stride, p.q_row_stride, p.q_head_stride, 0}});
  check("k", {p.k,
              bytes,
              p.head_dim,
              {batch, rows_k, p.num_heads_kv, 1},
              {p.k_batch_stride, p.k_row_stride, p.k_head_stride, 0}});
  check("v", {p.v,
              bytes,
              p.head_dim_v,
              {batch, rows_k, p.num_heads_kv, 1},
              {p.v_batch_stride, p.v_row_stride, p.v_head_stride, 0}});
  const std::int64_t scores[4] = {p.batch_size, p.num_heads, p.seqlen_q, p.seqlen_k};
  if (p.bias) {
    check("bias",
          {p.bias,
           size_of(p.bias_dtype),
           1,
           {scores[0], scores[1], scores[2], scores[3]},
           {p.bias_batch_stride, p.bias_head_stride, p.bias_row_stride, p.bias_col_stride}});
  }
  if (p.mask) {
    check("mask",
          {p.mask,
           1,
           1,
           {scores[0], scores[1], scores[2], scores[3]},
           {p.mask_batch_stride, p.mask_head_stride, p.mask_row_stride, p.mask_col_stride}});
  }
  if (p.alibi_slopes) {
    check("alibi_slopes", {p.alibi_slopes,
                           4,
                           1,
                           {p.batch_size, p.num_heads, 1, 1},
                           {p.alibi_batch_stride, p.alibi_head_stride, 0, 0}});
  }
  if (p.sinks) check("sinks", {p.sinks, 4, 1, {p.num_heads, 1, 1, 1}, {p.sinks_stride, 0, 0, 0}});
  const auto check_list = [&](const char* name, const std::int32_t* list, std::int64_t count) {
    if (list) check(name, {list, 4, count, {1, 1, 1, 1}, {}});
  };
  check_list("cu_seqlens_q", p.cu_seqlens_q, p.batch_size + 1);
  check_list("cu_seqlens_k", p.cu_seqlens_k, p.batch_size + 1);
  check_list("seqused_k", p.seqused_k, p.batch_size);
}

void check_own_memory(const MergeParams& p) {
  const Named out = {"out",
                     {p.out,
                      size_of(p.dtype),
                      p.head_dim_v,
                      {p.batch_size, p.seqlen_q, p.num_heads, 1},
                      {p.out_batch_stride, p.out_row_stride, p.out_head_stride, 0}}};
  const Named lse = {"lse",
                     {p.lse,
                      4,
                      p.seqlen_q,
                      {p.batch_size, p.num_heads, 1, 1},
                      {p.lse_batch_stride, p.lse_head_stride, 0, 0}}};
  check_own_memory(out, lse);
  for (int n = 0; n < p.num_states; ++n) {
    const Named inputs[] = {
        {"outs",
         {p.outs[n],
          size_of(p.dtype),
          p.head_dim_v,
          {p.batch_size, p.seqlen_q, p.num_heads, 1},
          {p.outs_batch_stride[n], p.outs_row_stride[n], p.outs_head_stride[n], 0}}},
        {"lses",
         {p.lses[n],
          4,
          1,
          {p.batch_size, p.num_heads, p.seqlen_q, 1},
          {p.lses_batch_stride[n], p.lses_head_stride[n], p.lses_row_stride[n], 0}}}};
    for (const Named& input : inputs) {
      check_own_memory(out, input);
      check_own_memory(lse, input);
    }
  }
}

}  // namespace

void validate(const AttentionParams& params) {
  check_sizes(params);
  check_varlen(params);
  check_pointers(params);
  check_addresses(params);
  check_layouts(params);
  check_scores(params);
  check_own_memory(params);
}

void validate(const MergeParams& p) {
  if (p.num_states < 1 || p.num_states > kMaxMergeStates) {
    fail("outs holds ", p.num_states, " parts; accepted: 1 to ", kMaxMergeStates);
  }
  check_at_least("batch_size", p.batch_size, 0);
  check_at_least("seqlen_q", p.seqlen_q, 0);
  check_at_least("num_heads", p.num_heads, 1);
  check_at_least("head_dim of outs", p.head_dim_v, 1);
  if (p.batch_size * p.seqlen_q == 0) return;
  if (!p.out) fail("out is null");
  if (!p.lse) fail("lse is null");
  for (int n = 0; n < p.num_states; ++n) {
    if (!p.outs[n]) fail("outs[", n, "] is null");
    if (!p.lses[n]) fail("lses[", n, "] is null");
    check_address("outs", p.outs[n], size_of(p.dtype));
    check_address("lses", p.lses[n], sizeof(float));
    check_stride("outs", "batch", p.batch_size, p.outs_batch_stride[n]);
    check_stride("outs", "seqlen", p.seqlen_q, p.outs_row_stride[n]);
    check_stride("outs", "num_heads", p.num_heads, p.outs_head_stride[n]);
    check_stride("lses", "batch", p.batch_size, p.lses_batch_stride[n]);
    check_stride("lses", "num_heads", p.num_heads, p.lses_head_stride[n]);
    check_stride("lses", "seqlen", p.seqlen_q, p.lses_row_stride[n]);
  }
  check_output_layout("out", p.head_dim_v, {p.batch_size, p.seqlen_q, p.num_heads},
                      {p.out_batch_stride, p.out_row_stride, p.out_head_stride});
  check_output_layout("lse", p.seqlen_q, {p.batch_size, p.num_heads, 1},
                      {p.lse_batch_stride, p.lse_head_stride, 0});
  check_own_memory(p);
}

}  // namespace dlattn::core
