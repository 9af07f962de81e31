#include "core/validate/validate.h"

#include <algorithm>

#include "core/operations/forward.h"
#include "core/operations/operation.h"
#include "core/operations/quantize.h"
#include "core/operations/tensors.h"
#include "core/problem/quantized.h"
#include "core/util/concat.h"
#include "core/validate/cache.h"
#include "core/validate/call_memory.h"
#include "core/validate/checks.h"
#include "core/validate/fail.h"
#include "core/validate/varlen.h"

namespace dlattn::core {
namespace {

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
  check_sizes(operands_of(p), &p);
  if (p.num_heads % p.num_heads_kv != 0) {
    fail("k: num_heads_kv = ", p.num_heads_kv, " does not divide num_heads = ", p.num_heads,
         " of q; accepted: a divisor of ", p.num_heads);
  }
  check_elements("", "batch_size x seqlen_q x num_heads", {p.batch_size, p.seqlen_q, p.num_heads});
  check_elements("", "batch_size x seqlen_k x num_heads_kv",
                 {p.batch_size, p.seqlen_k, p.num_heads_kv});
  const std::int64_t group = p.num_heads / p.num_heads_kv;
  if (p.heads_per_q_descale != 1 && p.heads_per_q_descale != group) {
    fail("heads_per_q_descale is ", p.heads_per_q_descale, "; accepted: 1 or num_heads / ",
         "num_heads_kv = ", group);
  }
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
  } descales[] = {
      {"q_descale", p.q_descale}, {"k_descale", p.k_descale}, {"v_descale", p.v_descale}};
  const bool is_8_bit = p.q.dtype == DType::kFloat8E4M3, of_cache = is_8_bit_cache(p);
  for (const auto& descale : descales) {
    const bool of_q = &descale == descales;
    if (!descale.view.data) {
      if (of_cache && !of_q) {
        fail(descale.name, " is null with a cache of ", to_string(p.k.dtype),
             "; accepted: the factor of its elements, [batch_size, num_heads_kv]");
      }
      continue;
    }
    if (!is_8_bit && (!of_cache || of_q)) {
      fail(descale.name, " is given with q of ", to_string(p.q.dtype),
           "; accepted: none, as descales are for ",
           of_q ? "float8_e4m3fn alone" : "8-bit elements alone");
    }
  }
  if (!is_8_bit) return;
  if (p.alibi_slopes.data) fail("alibi_slopes is given with q of float8_e4m3fn; accepted: none");
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
                              : p.alibi_slopes.data ? "alibi_slopes"
                                                    : nullptr;
  if (refused) fail(refused, " is given with precision ", precision, "; accepted: none");
  check_address("quantized_kv", p.quantized_kv, buffer_alignment(p.device));
}

// Those that the call is given. k and v are not read beside quantized_kv: of them the address alone
// is checked.
GivenTensors tensors_of(const AttentionParams& p, const Sizes& sizes) {
  if (!p.quantized_kv) return GivenTensors(operands_of(p), &p, sizes);
  AttentionParams read = p;
  for (TensorView* view : {&read.k, &read.v}) {
    const void* const data = view->data;
    *view = TensorView(), view->data = data, view->dtype = p.q.dtype;
  }
  return GivenTensors(operands_of(p), &read, sizes);
}

// A bias is in q's dtype or in fp32; beside 8-bit q it may have either dtype of 16 bits.
void check_bias_dtype(DType bias, DType q) {
  if (bias == DType::kFloat32) return;
  if (q == DType::kFloat8E4M3) {
    if (is_16_bit(bias)) return;
    fail("bias: dtype is ", to_string(bias),
         "; accepted: float16, bfloat16 or float32 with q of float8_e4m3fn");
  }
  if (bias == q) return;
  fail("bias: dtype is ", to_string(bias),
       "; accepted: ", q == DType::kFloat32 ? "" : concat(to_string(q), " (that of q) or "),
       "float32");
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
  if (p.bias.data) check_bias_dtype(p.bias.dtype, p.q.dtype);
}

}  // namespace

void check_numbers(const AttentionParams& params) {
  check_enums(params);
  check_sizes(params);
  check_cache(params);
  check_varlen(params);
  check_precision(params);
}

void check_tensors(const AttentionParams& params, const GivenTensors& tensors, const Sizes& sizes) {
  check_elements(tensors);
  check_dtypes(params);
  check_descales(params);
  if (sizes['B'] != 0 && sizes['S'] != 0) check_given(tensors);
  check_layouts(tensors);
  check_lengths(params);
  check_scores(params);
  check_own_memory(tensors);
}

void check_call_memory(const AttentionParams& params) {
  check_own_memory(tensors_of(params, sizes_of(params)));
}

void validate(const AttentionParams& params) {
  check_numbers(params);
  const Sizes sizes = sizes_of(params);
  check_tensors(params, tensors_of(params, sizes), sizes);
}

void validate(const Options& options) {
  check_at_least("num_splits", options.num_splits, 0);
  if (options.split_size < 0 || options.split_size % kSplitAlignment != 0) {
    fail("split_size is ", options.split_size, "; accepted: multiples of ", kSplitAlignment,
         " keys, or 0: the plan decides");
  }
  if (options.num_splits == 0) return;
  if (options.split_size > 0) fail("num_splits is given with split_size; accepted: one of them");
  if (options.batch_invariant && options.num_splits > 1) {
    fail("num_splits is ", options.num_splits,
         " with batch_invariant; accepted: 0 or 1, or a split_size, as the keys of a part must not "
         "depend on a sequence's length");
  }
}

void validate_sizes(const QuantizeParams& p) {
  check_precision_known(p.precision);
  check_device_type(p.device.type);
  if (p.precision == Precision::kInputs)
    fail("precision is inputs; accepted: int8_fp8, fp8, int8_fp16");
  check_sizes(operands_of(p), &p);
  check_quantized_dims(p.head_dim, p.head_dim_v, p.precision);
  check_elements("", "batch_size x seqlen_k x num_heads_kv",
                 {p.batch_size, p.seqlen_k, p.num_heads_kv});
  check_elements("", "total_k x num_heads_kv", {p.total_k, p.num_heads_kv});
}

void validate(const QuantizeParams& p) {
  validate_sizes(p);
  const struct {
    const char* name;
    DType dtype;
  } dtypes[] = {{"k", p.k.dtype}, {"v", p.v.dtype}};
  for (const auto& t : dtypes) {
    if (!is_16_bit(t.dtype)) {
      fail(t.name, ": dtype is ", to_string(t.dtype),
           "; accepted: float16 or bfloat16 with precision ", to_string(p.precision));
    }
    check_dtype(t.name, t.dtype, "k", p.k.dtype);
  }
  const Sizes sizes = sizes_of(p);
  const GivenTensors tensors(operands_of(p), &p, sizes);
  check_elements(tensors);
  check_layouts(tensors);
  check_address("quantized_kv", p.quantized_kv, buffer_alignment(p.device));
  check_lengths(p);
  check_given(tensors);
  check_own_memory(tensors);
}

}  // namespace dlattn::core
