#include "core/validate.h"

#include <algorithm>

#include "core/cache.h"
#include "core/call_memory.h"
#include "core/checks.h"
#include "core/concat.h"
#include "core/fail.h"
#include "core/operation.h"
#include "core/quantized.h"
#include "core/tensor_sizes.h"
#include "core/varlen.h"

namespace dlattn::core {
namespace {

constexpr const char* kOutNeeds = "out needs strides of at least ";

// Wider than any sequence, and small enough that positions can be added to it.
constexpr std::int64_t kMaxWindow = std::int64_t{1} << 40;

void check_window(const char* name, std::int64_t value) {
  if (value < -1 || value > kMaxWindow) {
    fail(name, " is ", value, "; accepted: 0 to ", kMaxWindow, " tokens, or -1 for no limit");
  }
}

void check_precision_known(Precision precision) {
  check_enum("precision", precision, Precision::kInt8Fp16,
             "Precision::kInputs, kInt8Fp8, kFp8, kInt8Fp16");
}

void check_enums(const AttentionParams& p) {
  check_enum("causal", p.causal, Causal::kTopLeft, "Causal::kNone, kBottomRight, kTopLeft");
  check_precision_known(p.precision);
  check_device_type(p.device.type);
  check_known_dtype("q", p.q.dtype);
  check_known_dtype("out", p.out.dtype);
  if (p.bias.data) check_known_dtype("bias", p.bias.dtype);
  if (p.quantized_kv) return;
  check_known_dtype("k", p.k.dtype);
  check_known_dtype("v", p.v.dtype);
}

void check_sizes(const AttentionParams& p) {
  check_count("batch_size", p.batch_size, 0);
  check_length("seqlen_q", p.seqlen_q, 0);
  check_length("seqlen_k", p.seqlen_k, 0);
  check_count("num_heads", p.num_heads, 1);
  check_count("num_heads_kv", p.num_heads_kv, 1);
  if (p.num_heads % p.num_heads_kv != 0) {
    fail("k: num_heads_kv = ", p.num_heads_kv, " does not divide num_heads = ", p.num_heads,
         " of q; accepted: a divisor of ", p.num_heads);
  }
  check_count("head_dim", p.head_dim, 1);
  check_count("head_dim of v", p.head_dim_v, 1);
  check_elements("", "batch_size x seqlen_q x num_heads", {p.batch_size, p.seqlen_q, p.num_heads});
  check_elements("", "batch_size x seqlen_k x num_heads_kv",
                 {p.batch_size, p.seqlen_k, p.num_heads_kv});
  const std::int64_t group = p.num_heads / p.num_heads_kv;
  if (p.heads_per_q_descale != 1 && p.heads_per_q_descale != group) {
    fail("heads_per_q_descale is ", p.heads_per_q_descale, "; accepted: 1 or num_heads / ",
         "num_heads_kv = ", group);
  }
}

// Counts the elements; the sizes that key_sizes() takes have been checked.
void check_elements(const AttentionParams& p) {
  const TensorSizes queries = query_sizes(p), keys = key_sizes(p);
  check_elements("q", queries, p.head_dim);
  check_elements("k", keys, p.head_dim);
  check_elements("v", keys, p.head_dim_v);
  check_elements("out", queries, p.head_dim_v);
}

void check_layouts(const AttentionParams& p) {
  const TensorSizes queries = query_sizes(p), keys = key_sizes(p);
  check_strides("q", p.q, queries, p.head_dim);
  if (!p.quantized_kv) {
    check_strides("k", p.k, keys, p.head_dim);
    check_strides("v", p.v, keys, p.head_dim_v);
  }
  if (queries.batch * queries.rows == 0) return;
  check_span("out", size_of(p.out.dtype), p.head_dim_v,
             {{"batch", queries.batch, p.out.batch_stride},
              {"seqlen", queries.rows, p.out.row_stride},
              {"num_heads", queries.heads, p.out.head_stride}});
  check_output_layout("out", kOutNeeds, p.head_dim_v, {queries.batch, queries.rows, queries.heads},
                      {p.out.batch_stride, p.out.row_stride, p.out.head_stride});
  if (p.lse.data) {
    check_span("lse", sizeof(float), queries.rows,
               {{"batch", queries.batch, p.lse.batch_stride},
                {"num_heads", queries.heads, p.lse.head_stride}});
    check_output_layout("lse", kOutNeeds, queries.rows, {queries.batch, queries.heads, 1},
                        {p.lse.batch_stride, p.lse.head_stride, 0});
  }
}

void check_dtype(const char* name, DType dtype, const char* other, DType expected) {
  if (dtype == expected) return;
  fail(name, ": dtype is ", to_string(dtype), "; accepted: ", to_string(expected), ", that of ",
       other);
}

bool is_16_bit(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

// Checks k and v of another dtype than q's.
void check_8_bit_cache(const AttentionParams& p) {
  if (!is_cache(p)) {
    fail("k: dtype is ", to_string(p.k.dtype), "; accepted: ", to_string(p.q.dtype),
         ", that of q, as the keys are not in a cache");
  }
  if (!is_16_bit(p.q.dtype)) {
    fail("q: dtype is ", to_string(p.q.dtype), " with k of ", to_string(p.k.dtype),
         "; accepted: float16, bfloat16");
  }
  check_dtype("v", p.v.dtype, "k", p.k.dtype);
}

void check_dtypes(const AttentionParams& p) {
  if (is_8_bit_cache(p)) {
    check_8_bit_cache(p);
  } else if (!p.quantized_kv) {
    check_dtype("k", p.k.dtype, "q", p.q.dtype);
    check_dtype("v", p.v.dtype, "q", p.q.dtype);
  }
  if (p.q.dtype != DType::kFloat8E4M3) return check_dtype("out", p.out.dtype, "q", p.q.dtype);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    if (p.out.dtype == dtype) return;
  }
  fail("out: dtype is ", to_string(p.out.dtype),
       "; accepted: bfloat16, float16, float32, as q is of float8_e4m3fn");
}

// Checks the tensors that 8-bit inputs need, and those that they refuse.
void check_descales(const AttentionParams& p) {
  const struct {
    const char* name;
    const BasicTensorView<const float>& view;
    std::int64_t heads;
  } descales[] = {{"q_descale", p.q_descale, p.num_heads / p.heads_per_q_descale},
                  {"k_descale", p.k_descale, p.num_heads_kv},
                  {"v_descale", p.v_descale, p.num_heads_kv}};
  const bool is_8_bit = p.q.dtype == DType::kFloat8E4M3, of_cache = is_8_bit_cache(p);
  for (const auto& descale : descales) {
    const bool of_q = &descale == descales;
    if (!descale.view.data) {
      if (of_cache && !of_q) {
        fail(descale.name, " is null with a cache of ", to_string(p.k.dtype),
             "; accepted: what its elements count, [batch_size, num_heads_kv]");
      }
      continue;
    }
    if (!is_8_bit && (!of_cache || of_q)) {
      fail(descale.name, " is given with q of ", to_string(p.q.dtype),
           "; accepted: none, as descales are for ",
           of_q ? "float8_e4m3fn alone" : "8-bit elements alone");
    }
    check_strides(descale.name, sizeof(float), 1,
                  {{"batch", p.batch_size, descale.view.batch_stride},
                   {"num_heads", descale.heads, descale.view.head_stride}});
    check_address(descale.name, descale.view.data, sizeof(float));
  }
  if (!is_8_bit) return;
  const char* const refused = p.bias.data           ? "bias"
                              : p.mask.data         ? "mask"
                              : p.alibi_slopes.data ? "alibi_slopes"
                                                    : nullptr;
  if (refused) fail(refused, " is given with q of float8_e4m3fn; accepted: none");
}

// The alignment of quantize_kv()'s buffer: copies on a GPU take 16 bytes and more at a time.
std::int64_t buffer_alignment(Device device) {
  return device.type == DeviceType::kCuda ? kWorkspaceAlignment : std::int64_t{sizeof(float)};
}

void check_quantized_dims(std::int64_t head_dim, std::int64_t head_dim_v, Precision precision) {
  const NamedSize dims[] = {{"head_dim", head_dim}, {"head_dim of v", head_dim_v}};
  for (const NamedSize& dim : dims) {
    if (dim.value > kMaxQuantizedHeadDim) {
      fail(dim.name, " is ", dim.value, "; accepted: 1 to ", kMaxQuantizedHeadDim,
           " with precision ", to_string(precision));
    }
  }
}

// Checks the fields that 8-bit products of 16-bit inputs need, and those that go with them alone.
void check_precision(const AttentionParams& p) {
  if (p.precision == Precision::kInputs) {
    if (p.quantized_kv) fail("quantized_kv is given with precision inputs; accepted: none");
    return;
  }
  const char* const precision = to_string(p.precision);
  if (!is_16_bit(p.q.dtype)) {
    fail("precision is ", precision, " with q of ", to_string(p.q.dtype),
         "; accepted: with float16 or bfloat16");
  }
  check_quantized_dims(p.head_dim, p.head_dim_v, p.precision);
  const char* const refused = p.softcap != 0.0      ? "softcap"
                              : p.bias.data         ? "bias"
                              : p.alibi_slopes.data ? "alibi_slopes"
                                                    : nullptr;
  if (refused) fail(refused, " is given with precision ", precision, "; accepted: none");
  check_address("quantized_kv", p.quantized_kv, buffer_alignment(p.device));
}

void check_addresses(const AttentionParams& p) {
  check_address("q", p.q.data, size_of(p.q.dtype));
  check_address("k", p.k.data, size_of(p.quantized_kv ? p.q.dtype : p.k.dtype));
  check_address("v", p.v.data, size_of(p.quantized_kv ? p.q.dtype : p.v.dtype));
  check_address("out", p.out.data, size_of(p.out.dtype));
  check_address("lse", p.lse.data, sizeof(float));
  check_address("bias", p.bias.data, size_of(p.bias.dtype));
  check_address("alibi_slopes", p.alibi_slopes.data, sizeof(float));
  check_address("sinks", p.sinks.data, sizeof(float));
  check_address("cu_seqlens_q", p.cu_seqlens_q, sizeof(std::int32_t));
  check_address("cu_seqlens_k", p.cu_seqlens_k, sizeof(std::int32_t));
  check_address("seqused_k", p.seqused_k, sizeof(std::int32_t));
  check_address("page_table", p.page_table.data, sizeof(std::int32_t));
  check_address("cache_batch_idx", p.cache_batch_idx, sizeof(std::int32_t));
  check_address("leftpad_k", p.leftpad_k, sizeof(std::int32_t));
}

void check_pointers(const AttentionParams& p) {
  const TensorSizes queries = query_sizes(p), keys = key_sizes(p);
  if (queries.batch * queries.rows == 0) return;
  if (!p.q.data) fail("q is null");
  if (!p.out.data) fail("out is null");
  if (keys.batch * keys.rows == 0 || p.quantized_kv) return;
  if (!p.k.data) fail("k is null");
  if (!p.v.data) fail("v is null");
}

// A tensor of an element for each score.
template <typename T>
void check_score_strides(const char* name, std::int64_t element_bytes, const AttentionParams& p,
                         const BasicTensorView<T>& x) {
  check_strides(name, element_bytes, 1,
                {{"batch", p.batch_size, x.batch_stride},
                 {"num_heads", p.num_heads, x.head_stride},
                 {"seqlen_q", p.seqlen_q, x.row_stride},
                 {"seqlen_k", p.seqlen_k, x.col_stride}});
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
  if (p.bias.data) {
    if (p.bias.dtype != p.q.dtype && p.bias.dtype != DType::kFloat32) {
      fail("bias: dtype is ", to_string(p.bias.dtype), "; accepted: ",
           p.q.dtype == DType::kFloat32 ? "" : concat(to_string(p.q.dtype), " (that of q) or "),
           "float32");
    }
    check_score_strides("bias", size_of(p.bias.dtype), p, p.bias);
  }
  if (p.mask.data) check_score_strides("mask", 1, p, p.mask);
  if (p.alibi_slopes.data) {
    check_strides("alibi_slopes", sizeof(float), 1,
                  {{"batch", p.batch_size, p.alibi_slopes.batch_stride},
                   {"num_heads", p.num_heads, p.alibi_slopes.head_stride}});
  }
  if (p.sinks.data) {
    check_strides("sinks", sizeof(float), 1, {{"num_heads", p.num_heads, p.sinks.head_stride}});
  }
}

}  // namespace

void validate(const AttentionParams& params) {
  check_enums(params);
  check_sizes(params);
  check_cache(params);
  check_varlen(params);
  check_elements(params);
  check_lengths(params);
  check_pointers(params);
  check_precision(params);
  check_dtypes(params);
  check_descales(params);
  check_addresses(params);
  check_layouts(params);
  check_scores(params);
  check_own_memory(params);
}

void validate(const Options& options) {
  check_at_least("num_splits", options.num_splits, 0);
  if (options.split_size < 0 || options.split_size % kSplitAlignment != 0) {
    fail("split_size is ", options.split_size, "; accepted: multiples of ", kSplitAlignment,
         " keys, or 0 for what the plan decides");
  }
  if (options.num_splits == 0) return;
  if (options.split_size > 0) fail("num_splits is given with split_size; accepted: one of them");
  if (options.batch_invariant && options.num_splits > 1) {
    fail("num_splits is ", options.num_splits,
         " with batch_invariant; accepted: 0 or 1, or a split_size, as what a part has must not "
         "depend on a sequence's length");
  }
}

void validate_sizes(const QuantizeParams& p) {
  check_precision_known(p.precision);
  check_device_type(p.device.type);
  if (p.precision == Precision::kInputs)
    fail("precision is inputs; accepted: int8_fp8, fp8, int8_fp16");
  check_count("batch_size", p.batch_size, 0);
  check_length("seqlen_k", p.seqlen_k, 0);
  check_count("num_heads_kv", p.num_heads_kv, 1);
  check_count("head_dim", p.head_dim, 1);
  check_count("head_dim of v", p.head_dim_v, 1);
  check_quantized_dims(p.head_dim, p.head_dim_v, p.precision);
  check_count("total_k", p.total_k, 0);
  check_elements("", "batch_size x seqlen_k x num_heads_kv",
                 {p.batch_size, p.seqlen_k, p.num_heads_kv});
  check_elements("", "total_k x num_heads_kv", {p.total_k, p.num_heads_kv});
}

void validate(const QuantizeParams& p) {
  validate_sizes(p);
  check_lengths(p);
  const TensorSizes keys = p.cu_seqlens_k ? TensorSizes{1, p.total_k, p.num_heads_kv}
                                          : TensorSizes{p.batch_size, p.seqlen_k, p.num_heads_kv};
  const struct {
    const char* name;
    const TensorView& view;
    std::int64_t columns;
  } tensors[] = {{"k", p.k, p.head_dim}, {"v", p.v, p.head_dim_v}};
  for (const auto& t : tensors) {
    if (!is_16_bit(t.view.dtype)) {
      fail(t.name, ": dtype is ", to_string(t.view.dtype),
           "; accepted: float16 or bfloat16 with precision ", to_string(p.precision));
    }
    check_dtype(t.name, t.view.dtype, "k", p.k.dtype);
    check_address(t.name, t.view.data, size_of(t.view.dtype));
    check_strides(t.name, t.view, keys, t.columns);
  }
  check_address("cu_seqlens_k", p.cu_seqlens_k, sizeof(std::int32_t));
  check_address("seqused_k", p.seqused_k, sizeof(std::int32_t));
  check_address("quantized_kv", p.quantized_kv, buffer_alignment(p.device));
  if (keys.batch * keys.rows == 0) return;
  if (!p.quantized_kv) fail("quantized_kv is null");
  for (const auto& t : tensors) {
    if (!t.view.data) fail(t.name, " is null");
  }
  check_own_memory(p);
}

void validate(const MergeParams& p) {
  if (p.num_states < 1 || p.num_states > kMaxMergeStates) {
    fail("outs holds ", p.num_states, " parts; accepted: 1 to ", kMaxMergeStates);
  }
  check_device_type(p.device.type);
  check_known_dtype("out", p.out.dtype);
  check_count("batch_size", p.batch_size, 0);
  check_length("seqlen_q", p.seqlen_q, 0);
  check_count("num_heads", p.num_heads, 1);
  check_count("head_dim of outs", p.head_dim_v, 1);
  check_elements("outs", {p.batch_size, p.seqlen_q, p.num_heads}, p.head_dim_v);
  if (p.out.dtype == DType::kFloat8E4M3 || p.out.dtype == DType::kInt8) {
    fail("out: dtype is ", to_string(p.out.dtype),
         "; accepted: float16, bfloat16, float32, float64");
  }
  if (p.batch_size * p.seqlen_q == 0) return;
  if (!p.out.data) fail("out is null");
  if (!p.lse.data) fail("lse is null");
  for (int n = 0; n < p.num_states; ++n) {
    if (!p.outs[n].data) fail("outs[", n, "] is null");
    if (!p.lses[n].data) fail("lses[", n, "] is null");
    check_dtype("outs", p.outs[n].dtype, "out", p.out.dtype);
    check_address("outs", p.outs[n].data, size_of(p.out.dtype));
    check_address("lses", p.lses[n].data, sizeof(float));
    check_strides("outs", p.outs[n], {p.batch_size, p.seqlen_q, p.num_heads}, p.head_dim_v);
    check_strides("lses", sizeof(float), 1,
                  {{"batch", p.batch_size, p.lses[n].batch_stride},
                   {"num_heads", p.num_heads, p.lses[n].head_stride},
                   {"seqlen", p.seqlen_q, p.lses[n].row_stride}});
  }
  check_span("out", size_of(p.out.dtype), p.head_dim_v,
             {{"batch", p.batch_size, p.out.batch_stride},
              {"seqlen", p.seqlen_q, p.out.row_stride},
              {"num_heads", p.num_heads, p.out.head_stride}});
  check_span(
      "lse", sizeof(float), p.seqlen_q,
      {{"batch", p.batch_size, p.lse.batch_stride}, {"num_heads", p.num_heads, p.lse.head_stride}});
  check_output_layout("out", kOutNeeds, p.head_dim_v, {p.batch_size, p.seqlen_q, p.num_heads},
                      {p.out.batch_stride, p.out.row_stride, p.out.head_stride});
  check_output_layout("lse", kOutNeeds, p.seqlen_q, {p.batch_size, p.num_heads, 1},
                      {p.lse.batch_stride, p.lse.head_stride, 0});
  check_own_memory(p);
}

}  // namespace dlattn::core
