#include "problem.h"

#include <cmath>
#include <iterator>
#include <string>

#include "arguments.h"
#include "cache.h"
#include "dlattn/backward.h"
#include "errors.h"
#include "gil.h"
#include "quantized.h"

namespace dlattn::python {
namespace {

constexpr dlpack::DLDataType kBool{dlpack::kBool, 8, 1};

// Reads a descale that broadcasts, right-aligned, to [batch_size, heads]; `heads` is the first of
// `accepted` that it fits.
template <typename View>
std::int64_t read_descale(const Tensor& descale, std::int64_t batch_size,
                          const std::int64_t (&accepted)[2], View* view) {
  const auto size = [&](int from_last) {
    return descale.ndim > from_last ? descale.shape[descale.ndim - 1 - from_last] : 1;
  };
  const auto stride = [&](int from_last) {
    return size(from_last) > 1 ? descale.strides[descale.ndim - 1 - from_last] : 0;
  };
  for (const std::int64_t heads : accepted) {
    const bool fits = descale.ndim <= 2 && (size(0) == 1 || size(0) == heads) &&
                      (size(1) == 1 || size(1) == batch_size);
    if (!fits) continue;
    view->batch_stride = stride(1);
    view->head_stride = stride(0);
    return heads;
  }
  const std::int64_t first[] = {batch_size, accepted[0]}, second[] = {batch_size, accepted[1]};
  unsupported(
      descale.name, ": shape is ", shape_text(descale.shape, descale.ndim),
      "; accepted: one that broadcasts to (batch, num_heads_kv) = ", shape_text(second, 2),
      accepted[0] == accepted[1] ? "" : concat(" or (batch, num_heads) = ", shape_text(first, 2)));
}

// Reads an optional tensor by what the table says of it.
void read_operand(const core::Operand& operand, const Tensor& tensor, Problem* problem) {
  AttentionParams& p = problem->params;
  if (operand.kind == core::Kind::kList)
    return core::store(&p, operand.offset, int32s_of(tensor, p.batch_size, "(batch,)"));
  TensorView view;
  view.data = tensor.data;
  if (operand.elements == core::Elements::kAny) {
    view.dtype = to_dtype(tensor, "that of q, or float32");
  } else {
    check_dtype(tensor, operand.elements == core::Elements::kBool ? kBool : kFloat32);
  }
  const std::string_view dims = operand.dims;
  if (dims == "bhst") {
    read_scores(tensor, p, &view);
  } else if (dims == "bh") {
    read_by_head(tensor, p, &view);
  } else if (dims == "h") {
    check_shape(tensor, {1, {p.num_heads}}, "(num_heads,)");
    view.head_stride = tensor.strides[0];
  } else {
    const bool of_q = dims == "bn";
    const std::int64_t most = of_q ? p.num_heads : p.num_heads_kv;
    const std::int64_t heads = read_descale(tensor, p.batch_size, {most, p.num_heads_kv}, &view);
    if (of_q && heads != p.num_heads && heads > 0) p.heads_per_q_descale = p.num_heads / heads;
    static constexpr float kNoSequence[1] = {1.0f};
    if (tensor.num_elements() == 0) view.data = kNoSequence;
  }
  core::store(&p, operand.offset, view);
}

void check_descales_given(const AttentionParams& p) {
  if (!is_8_bit_cache(p)) return;
  const char* const missing = !p.k_descale.data   ? "k_descale"
                              : !p.v_descale.data ? "v_descale"
                                                  : nullptr;
  if (!missing) return;
  unsupported(missing, " is None with keys of ", to_string(p.k.dtype),
              "; accepted: a float32 tensor, the factor of the cache's elements");
}

void read_cu_seqlens_q(const Tensor& cu_seqlens_q, Problem* problem) {
  AttentionParams& p = problem->params;
  p.cu_seqlens_q = int32s_of(cu_seqlens_q, -1, "(batch + 1,)");
  p.batch_size = cu_seqlens_q.shape[0] - 1;
}

void read_cu_seqlens_k(const Tensor& cu_seqlens_k, Problem* problem) {
  AttentionParams& p = problem->params;
  p.cu_seqlens_k = int32s_of(cu_seqlens_k, p.batch_size + 1, "(batch + 1,)");
}

// The dtype of out for that of q and what the caller asks for.
DType dtype_of_out(DType dtype, DType asked) {
  const bool none = asked == DType::kFloat8E4M3;
  if (dtype != DType::kFloat8E4M3) {
    if (none || asked == dtype) return dtype;
    unsupported("out_dtype is \"", to_string(asked), "\"; accepted: None or \"", to_string(dtype),
                "\", the dtype of q");
  }
  if (asked == DType::kFloat64) {
    unsupported(
        "out_dtype is \"float64\"; accepted: \"bfloat16\", \"float16\" or \"float32\", as q "
        "is of float8_e4m3fn");
  }
  return none ? DType::kBFloat16 : asked;
}

QkvDims qkv_dims(bool varlen, const Problem& problem) {
  const int skip = varlen ? 1 : 0;
  const Dims dims = dims_of(problem.layout);
  return {dims_text(problem.layout, varlen), {0, dims.row - skip, dims.head - skip}, 3 - skip};
}

// The dtypes of q that a call takes, in words.
const char* dtypes_of_q(const Problem& problem, Keys keys) {
  if (problem.params.precision != Precision::kInputs) return "float16, bfloat16";
  const bool of_gradients = problem.kernels == &backward_kernel_names();
  return of_gradients || keys != Keys::kAsQueries
             ? "float16, bfloat16, float32, float64"
             : "float16, bfloat16, float32, float64, float8_e4m3fn";
}

void read_q(const Tensor& q, bool varlen, Keys keys, const QkvDims& dims, Problem* problem) {
  AttentionParams& p = problem->params;
  const Dims& at = dims.at;
  const int last = dims.last;
  p.q.dtype = p.k.dtype = p.v.dtype = to_dtype(q, dtypes_of_q(*problem, keys));
  p.out.dtype = dtype_of_out(p.q.dtype, problem->out_dtype);
  check_rank(q, last + 1, dims.names);
  check_last_stride(q);
  if (varlen) {
    p.total_q = q.shape[at.row];
  } else {
    p.batch_size = q.shape[at.batch];
    p.seqlen_q = q.shape[at.row];
  }
  p.num_heads = q.shape[at.head];
  p.head_dim = q.shape[last];
  set_view(q, dims_of(problem->layout), varlen, &p.q);
}

// Sizes of the results, when those of the inputs are known.
void size_results(const Tensor& q, bool varlen, const QkvDims& dims, Problem* problem) {
  const AttentionParams& p = problem->params;
  problem->out.ndim = q.ndim;
  for (int i = 0; i < dims.last; ++i) problem->out.sizes[i] = q.shape[i];
  problem->out.sizes[dims.last] = p.head_dim_v;
  problem->lse = varlen ? Shape{2, {p.num_heads, p.total_q}}
                        : Shape{3, {p.batch_size, p.num_heads, p.seqlen_q}};
}

// The dtype of k or v: q's, or in a cache 8 bits.
void read_key_dtype(const Tensor& q, const Tensor& tensor, bool cached, DType* dtype) {
  if (same(tensor.dtype, q.dtype)) return;
  for (const DType bytes : {DType::kInt8, DType::kFloat8E4M3}) {
    if (!cached || !same(tensor.dtype, to_dlpack(bytes))) continue;
    *dtype = bytes;
    return;
  }
  const bool beside_8_bits = cached && q.dtype.bits == 16;
  unsupported(tensor.name, ": dtype is ", dtype_text(tensor.dtype),
              "; accepted: ", dtype_text(q.dtype), ", that of q",
              beside_8_bits ? ", or int8 or float8_e4m3fn with k_descale and v_descale" : "");
}

// q, k and v of one problem: sizes and strides, checked against each other.
void read_qkv(const Tensor& q, const Tensor& k, const Tensor& v, bool varlen, Keys keys,
              Problem* problem) {
  AttentionParams& p = problem->params;
  const QkvDims q_dims = qkv_dims(varlen, *problem);
  const bool cached = keys != Keys::kAsQueries;
  const QkvDims dims = cached ? cache_dims(keys, problem->layout) : q_dims;
  const Dims& at = dims.at;
  const int last = dims.last;
  read_q(q, varlen, keys, q_dims, problem);
  for (const Tensor* tensor : {&k, &v}) {
    check_rank(*tensor, last + 1, dims.names);
    read_key_dtype(q, *tensor, cached, tensor == &k ? &p.k.dtype : &p.v.dtype);
    check_last_stride(*tensor);
  }
  check_size(k, last, "head_dim", p.head_dim, "that of q");
  check_size(v, at.head, "num_heads", k.shape[at.head], "that of k");
  const bool packed = varlen && !cached;
  check_size(v, at.row,
             packed                 ? "the number of tokens"
             : keys == Keys::kPages ? "page_size"
                                    : "seqlen",
             k.shape[at.row], "that of k");
  if (cached) {
    size_cache(q, k, v, keys, problem);
  } else if (!varlen) {
    check_size(k, at.batch, "batch", q.shape[at.batch], "that of q");
    check_size(v, at.batch, "batch", q.shape[at.batch], "that of q");
    p.seqlen_k = k.shape[at.row];
  }
  p.total_k = packed ? k.shape[at.row] : 0;
  p.num_heads_kv = k.shape[at.head];
  p.head_dim_v = v.shape[last];
  set_view(k, dims_of(problem->layout), packed, &p.k);
  set_view(v, dims_of(problem->layout), packed, &p.v);
  size_results(q, varlen, q_dims, problem);
}

void read_qkv(const AttentionCall& call, const Target& target, Problem* problem) {
  const bool varlen = call.varlen();
  const Keys keys = keys_of(call);
  const Tensor& q = import_tensor(call.q, "q", target, problem);
  if (is_quantized_kv(call.k)) {
    if (keys != Keys::kAsQueries)
      unsupported("k is a QuantizedKV; accepted: a tensor, as keys in a cache are not quantised");
    const QkvDims dims = qkv_dims(varlen, *problem);
    read_q(q, varlen, keys, dims, problem);
    read_quantized_kv(call.k, call.v, varlen, target, problem);
    return size_results(q, varlen, dims, problem);
  }
  const Tensor& k = import_tensor(call.k, "k", target, problem);
  const Tensor& v = import_tensor(call.v, "v", target, problem);
  read_qkv(q, k, v, varlen, keys, problem);
}

void read_max_seqlen_q(nb::handle value, const char* name, Problem* problem) {
  problem->params.seqlen_q = parse_count(value, name);
}

void read_max_seqlen_k(nb::handle value, const char* name, Problem* problem) {
  problem->params.seqlen_k = parse_count(value, name);
}

// None: the plan decides. dlattn::forward checks the rest.
void read_num_splits(nb::handle value, const char* name, Problem* problem) {
  if (value.is_none()) return;
  const std::int64_t splits = parse_count(value, name);
  if (splits == 0) unsupported(name, " is 0; accepted: an int >= 1, or None: the plan decides");
  problem->options.num_splits = static_cast<int>(splits);
}

void read_split_size(nb::handle value, const char* name, Problem* problem) {
  if (value.is_none()) return;
  const std::int64_t keys = parse_count(value, name);
  if (keys == 0) {
    unsupported(name, " is 0; accepted: a multiple of ", kSplitAlignment,
                " keys, or None: the plan decides");
  }
  problem->options.split_size = keys;
}

// None: read_tensors sets the default, which needs head_dim.
void read_softmax_scale(nb::handle value, const char* name, Problem* problem) {
  if (!value.is_none()) problem->params.softmax_scale = parse_number(value, name);
}

// Every argument of attention, attention_varlen and attention_with_kvcache, in the order in which
// Python passes them: that of python/api/arguments.py. Settings and optional tensors are read in
// this order.
using H = nb::handle;
constexpr Argument described(const char* name, decltype(Argument::member) member = nullptr) {
  return {name, kAll, nullptr, nullptr, member, core::find(core::kForwardOperands, name)};
}
constexpr Argument kBeforeTensors[] = {
    by_name("q", &AttentionCall::q),
    of(kNotKvcache, by_name("k", &AttentionCall::k)),
    of(kNotKvcache, by_name("v", &AttentionCall::v)),
    of(kKvcache, by_name("k_cache", &AttentionCall::k)),
    of(kKvcache, by_name("v_cache", &AttentionCall::v)),
    of(kVarlen, by_name("cu_seqlens_q", &AttentionCall::cu_seqlens_q)),
    of(kVarlen, by_name("cu_seqlens_k", &AttentionCall::cu_seqlens_k)),
    of(kVarlen, setting("max_seqlen_q", read_max_seqlen_q)),
    of(kVarlen, setting("max_seqlen_k", read_max_seqlen_k)),
    of(kVarlen | kKvcache, described("seqused_k", &AttentionCall::seqused_k)),
    of(kVarlen | kKvcache,
       optional_tensor("page_table", read_page_table, &AttentionCall::page_table)),
    of(kKvcache, described("cache_batch_idx", &AttentionCall::cache_batch_idx)),
    of(kKvcache, described("leftpad_k")),
    of(kKvcache, setting("max_seqlen_k", read_max_seqlen_of_cache)),
    setting("causal", [](H x, const char*, Problem* p) { p->params.causal = parse_causal(x); }),
    setting("softmax_scale", read_softmax_scale, &AttentionCall::softmax_scale),
    setting("window",
            [](H x, const char*, Problem* p) {
              parse_window(x, &p->params.window_left, &p->params.window_right);
            }),
    setting("softcap",
            [](H x, const char* name, Problem* p) { p->params.softcap = parse_number(x, name); }),
};
constexpr Argument kBehindTensors[] = {
    of(kNotKvcache,
       setting("precision", [](H x, const char* name,
                               Problem* p) { p->params.precision = parse_precision(x, name); })),
    setting("layout", [](H x, const char*, Problem* p) { p->layout = parse_layout(x); }),
    by_name("out", &AttentionCall::out),
    of(kNotKvcache,
       setting("out_dtype",
               [](H x, const char* name, Problem* p) { p->out_dtype = parse_out_dtype(x, name); })),
    setting("return_lse",
            [](H x, const char* name, Problem* p) { p->return_lse = parse_flag(x, name); }),
    by_name("stream", &AttentionCall::stream),
    setting("kernel",
            [](H x, const char*, Problem* p) { parse_kernel(x, *p->kernels, &p->options); }),
    setting("batch_invariant",
            [](H x, const char* name, Problem* p) {
              p->options.batch_invariant = parse_flag(x, name);
            }),
    of(kVarlen | kKvcache, setting("num_splits", read_num_splits)),
    of(kVarlen | kKvcache, setting("split_size", read_split_size)),
    of(kVarlen | kKvcache, by_name("workspace", &AttentionCall::workspace)),
};
constexpr auto kArguments =
    with_optional_tensors<core::kForwardOperands>(kBeforeTensors, kBehindTensors);
static_assert(std::size(kArguments) <= AttentionCall::kMaxArguments);
// Besides the optional tensors of attention_varlen, which has the most: q, k, v, out, workspace
// and both cu_seqlens.
static_assert(num_optional_tensors<kArguments>(Function::kVarlen) + 7 <= Problem::kMaxTensors);
static_assert(num_optional_tensors<kArguments>(Function::kKvcache) + 5 <= Problem::kMaxTensors);

// Their interned names: by its address Python's name of a keyword is found without a comparison.
PyObject* argument_names[std::size(kArguments)];

// Where the argument of that name stands that a function takes; behind the last one: it takes none.
std::size_t index_of(nb::handle name, Function function) {
  const auto find = [&](const auto& is_named) {
    std::size_t i = 0;
    while (i < std::size(kArguments) &&
           !((kArguments[i].functions & bit(function)) != 0 && is_named(i)))
      ++i;
    return i;
  };
  const std::size_t i = find([&](std::size_t at) { return argument_names[at] == name.ptr(); });
  if (i < std::size(kArguments)) return i;
  return find([&](std::size_t at) {
    return PyUnicode_CompareWithASCIIString(name.ptr(), kArguments[at].name) == 0;
  });
}

const char* name_of(Function function) {
  constexpr const char* kNames[] = {"attention", "attention_varlen", "attention_with_kvcache"};
  return kNames[static_cast<int>(function)];
}

void set_options(const nb::dict& options, AttentionCall* call) {
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(options.ptr(), &at, &name, &value);) {
    const std::size_t i = index_of(name, call->function);
    if (i == std::size(kArguments)) {
      wrong_type(name_of(call->function), "() got an unexpected keyword argument '", text(name),
                 "'");
    }
    call->values[i] = value;
  }
}

template <std::size_t i>
void read_optional_tensor(const Tensor& tensor, Problem* problem) {
  constexpr Argument kArgument = kArguments[i];
  if constexpr (kArgument.read_tensor != nullptr) {
    kArgument.read_tensor(tensor, problem);
  } else {
    read_operand(*kArgument.operand, tensor, problem);
  }
}

// Calls `visit(i, name, read)` for each optional tensor, where `read` fills its fields.
template <typename Visit>
void for_each_optional_tensor(const Visit& visit) {
  for_each_argument<kArguments>([&](auto i) {
    constexpr Argument kArgument = kArguments[i];
    if constexpr (kArgument.is_optional_tensor())
      visit(std::size_t{i}, kArgument.name, read_optional_tensor<i>);
  });
}

}  // namespace

void read_scores(const Tensor& tensor, const AttentionParams& p, TensorView* view) {
  std::int64_t* const strides[4] = {&view->batch_stride, &view->head_stride, &view->row_stride,
                                    &view->col_stride};
  const std::int64_t full[4] = {p.batch_size, p.num_heads, p.seqlen_q, p.seqlen_k};
  bool fits = tensor.ndim <= 4;
  for (int i = 0; i < 4 && fits; ++i) {
    const int dim = i - (4 - tensor.ndim);
    *strides[i] = dim < 0 || tensor.shape[dim] == 1 ? 0 : tensor.strides[dim];
    fits = dim < 0 || tensor.shape[dim] == 1 || tensor.shape[dim] == full[i];
  }
  if (fits) return;
  unsupported(tensor.name, ": shape is ", shape_text(tensor.shape, tensor.ndim),
              "; accepted: one that broadcasts to (batch, num_heads, seqlen_q, seqlen_k) = ",
              shape_text(full, 4));
}

void read_by_head(const Tensor& tensor, const AttentionParams& p, TensorView* view) {
  const bool per_batch = tensor.ndim == 2;
  const bool fits = (tensor.ndim == 1 || per_batch) &&
                    tensor.shape[tensor.ndim - 1] == p.num_heads &&
                    (!per_batch || tensor.shape[0] == p.batch_size);
  if (!fits) {
    unsupported(tensor.name, ": shape is ", shape_text(tensor.shape, tensor.ndim),
                "; accepted: (num_heads,) = (", p.num_heads, ",) or (batch, num_heads) = (",
                p.batch_size, ", ", p.num_heads, ")");
  }
  view->batch_stride = per_batch ? tensor.strides[0] : 0;
  view->head_stride = tensor.strides[tensor.ndim - 1];
}

Dims dims_of(Layout layout) {
  return layout == Layout::kBshd ? Dims{0, 1, 2} : Dims{0, 2, 1};
}

const char* dims_text(Layout layout, bool listed) {
  if (listed)
    return layout == Layout::kBshd ? "(total, num_heads, head_dim)"
                                   : "(num_heads, total, head_dim)";
  return layout == Layout::kBshd ? "(batch, seqlen, num_heads, head_dim)"
                                 : "(batch, num_heads, seqlen, head_dim)";
}

void check_dtype(const Tensor& tensor, dlpack::DLDataType accepted) {
  if (same(tensor.dtype, accepted)) return;
  unsupported(tensor.name, ": dtype is ", dtype_text(tensor.dtype),
              "; accepted: ", dtype_text(accepted));
}

void check_size(const Tensor& tensor, int dim, const char* what, std::int64_t accepted,
                const char* reason) {
  if (tensor.shape[dim] == accepted) return;
  unsupported(tensor.name, ": ", what, " is ", tensor.shape[dim], ", shape ",
              shape_text(tensor.shape, tensor.ndim), "; accepted: ", accepted, ", ", reason);
}

void check_rank(const Tensor& tensor, int ndim, const char* dims) {
  if (tensor.ndim == ndim) return;
  unsupported(tensor.name, " has ", tensor.ndim, " dimensions, shape ",
              shape_text(tensor.shape, tensor.ndim), "; accepted: ", ndim, ", ", dims);
}

void check_shape(const Tensor& tensor, const Shape& shape, const char* dims) {
  bool fits = tensor.ndim == shape.ndim;
  for (int i = 0; i < shape.ndim && fits; ++i) fits = tensor.shape[i] == shape.sizes[i];
  if (fits) return;
  unsupported(tensor.name, ": shape is ", shape_text(tensor.shape, tensor.ndim),
              "; accepted: ", shape_text(shape.sizes, shape.ndim), ", ", dims);
}

void check_last_stride(const Tensor& tensor) {
  const int last = tensor.ndim - 1;
  if (tensor.strides[last] == 1 || tensor.shape[last] <= 1 || tensor.num_elements() == 0) return;
  unsupported(tensor.name, ": the stride of the last dimension is ", tensor.strides[last],
              "; accepted: 1 (elements of a row side by side)");
}

const std::int32_t* int32s_of(const Tensor& tensor, std::int64_t count, const char* dims) {
  check_dtype(tensor, kInt32);
  if (count >= 0) {
    check_shape(tensor, {1, {count}}, dims);
  } else {
    check_rank(tensor, 1, dims);
    if (tensor.shape[0] == 0) unsupported(tensor.name, " is empty; accepted: shape ", dims);
  }
  check_last_stride(tensor);
  return static_cast<const std::int32_t*>(tensor.data);
}

void read_descales(const Tensor& descale, std::int64_t batch_size, std::int64_t num_heads_kv,
                   BasicTensorView<const float>* view) {
  static constexpr float kNone[1] = {1.0f};  // of no sequence
  check_dtype(descale, kFloat32);
  read_descale(descale, batch_size, {num_heads_kv, num_heads_kv}, view);
  view->data = descale.num_elements() > 0 ? static_cast<const float*>(descale.data) : kNone;
}

const Tensor& import_tensor(nb::handle object, const char* name, const Target& target,
                            Problem* problem) {
  return problem->tensors[problem->num_tensors++] = import_tensor(object, name, target);
}

const Tensor& import_tensor_to_write(nb::handle object, const char* name, const Target& target,
                                     Problem* problem) {
  if (target.type->deferred || tensor_type(object, name).deferred)
    unsupported(name, ": JAX arrays are immutable; accepted: None");
  Tensor& tensor = problem->tensors[problem->num_tensors++];
  tensor = import_tensor(object, name, target, true);
  if (tensor.read_only) unsupported(name, " is read-only; accepted: a tensor that can be written");
  return tensor;
}

void read_workspace(nb::handle workspace, const Target& target, Problem* problem) {
  const Tensor& memory = import_tensor_to_write(workspace, "workspace", target, problem);
  std::int64_t expected = 1;
  for (int i = memory.ndim - 1; i >= 0; --i) {
    if (memory.shape[i] > 1 && memory.strides[i] != expected) {
      unsupported("workspace: its elements have gaps between them, shape ",
                  shape_text(memory.shape, memory.ndim), "; accepted: a contiguous tensor");
    }
    expected *= memory.shape[i];
  }
  problem->params.workspace = memory.num_elements() > 0 ? memory.data : nullptr;
  problem->params.workspace_bytes =
      memory.num_elements() * memory.dtype.bits * memory.dtype.lanes / 8;
}

void def_call(nb::module_& module, const char* name, const char* name_varlen,
              const char* name_kvcache, CallFunction call) {
  def_with<kArguments, Function::kAttention>(module, name, call);
  def_with<kArguments, Function::kVarlen>(module, name_varlen, call);
  if (name_kvcache) def_with<kArguments, Function::kKvcache>(module, name_kvcache, call);
}

void def_attention(nb::module_& module, CallFunction call) {
  for (std::size_t i = 0; i < std::size(kArguments); ++i)
    argument_names[i] = interned(kArguments[i].name).release().ptr();
  def_with_options<kArguments, Function::kAttention, 3, set_options>(module, "attention", call);
  def_with_options<kArguments, Function::kVarlen, 7, set_options>(module, "attention_varlen", call);
  def_with<kArguments, Function::kKvcache>(module, "attention_with_kvcache", call);
}

AttentionCall call_of(Function function, const nb::dict& arguments) {
  AttentionCall call;
  const auto fill = [&](auto of) {
    set_defaults<kArguments, of>(&call);
    set_options(arguments, &call);
    set_members<kArguments, of>(&call);
  };
  switch (function) {
    case Function::kAttention:
      fill(std::integral_constant<Function, Function::kAttention>());
      break;
    case Function::kVarlen:
      fill(std::integral_constant<Function, Function::kVarlen>());
      break;
    case Function::kKvcache:
      fill(std::integral_constant<Function, Function::kKvcache>());
      break;
  }
  return call;
}

Problem read_options(const AttentionCall& call, const std::vector<std::string_view>& kernels) {
  Problem problem;
  problem.kernels = &kernels;
  for_each_argument<kArguments>([&](auto i) {
    constexpr Argument kArgument = kArguments[i];
    if constexpr (kArgument.read != nullptr) {
      if (call.values[i].is_valid()) kArgument.read(call.values[i], kArgument.name, &problem);
    }
  });
  return problem;
}

void read_tensors(const AttentionCall& call, const Target& target, Problem* problem) {
  AttentionParams& p = problem->params;
  p.device = target.device;
  check_lengths_given(call);
  // First the number of sequences, which nothing may change once sizes were checked by it.
  if (call.varlen())
    read_cu_seqlens_q(import_tensor(call.cu_seqlens_q, "cu_seqlens_q", target, problem), problem);
  read_qkv(call, target, problem);
  if (call.softmax_scale.is_none()) p.softmax_scale = default_scale(p);
  if (call.varlen() && !call.is_paged())
    read_cu_seqlens_k(import_tensor(call.cu_seqlens_k, "cu_seqlens_k", target, problem), problem);
  for_each_optional_tensor([&](std::size_t i, const char* name, const auto& read) {
    const nb::handle value = call.values[i];
    if (value.is_valid() && !value.is_none())
      read(import_tensor(value, name, target, problem), problem);
  });
  check_descales_given(p);
  if (call.varlen() && is_quantized_kv(call.k)) check_key_lengths(call.k, p);
}

double default_scale(const AttentionParams& params) {
  return 1.0 / std::sqrt(static_cast<double>(params.head_dim > 0 ? params.head_dim : 1));
}

std::vector<GivenTensor> given_tensors(const AttentionCall& call) {
  std::vector<GivenTensor> given = {{"q", call.q}, {"k", call.k}, {"v", call.v}};
  if (call.varlen()) {
    given.push_back({"cu_seqlens_q", call.cu_seqlens_q});
    given.push_back({"cu_seqlens_k", call.cu_seqlens_k});
  }
  for_each_optional_tensor([&](std::size_t i, const char* name, const auto&) {
    const nb::handle value = call.values[i];
    if (value.is_valid() && !value.is_none()) given.push_back({name, value});
  });
  return given;
}

void read_tensors(const std::vector<Tensor>& tensors, Problem* problem) {
  const auto find = [&](std::string_view name) -> const Tensor* {
    for (const Tensor& tensor : tensors) {
      if (tensor.name == name) return &tensor;
    }
    return nullptr;
  };
  const Tensor* const cu_seqlens_q = find("cu_seqlens_q");
  if (cu_seqlens_q) read_cu_seqlens_q(*cu_seqlens_q, problem);
  read_qkv(*find("q"), *find("k"), *find("v"), cu_seqlens_q, Keys::kAsQueries, problem);
  if (cu_seqlens_q) read_cu_seqlens_k(*find("cu_seqlens_k"), problem);
  const std::size_t required = cu_seqlens_q ? 5 : 3;
  if (tensors.size() == required) return;  // as in most calls, without a search for each name
  for_each_optional_tensor([&](std::size_t, const char* name, const auto& read) {
    if (const Tensor* tensor = find(name)) read(*tensor, problem);
  });
}

void set_out(const Tensor& out, Problem* problem) {
  AttentionParams& p = problem->params;
  check_shape(out, problem->out, "that of q with the head_dim of v");
  // A given out decides the dtype for 8-bit inputs, among those that dlattn::forward accepts.
  if (p.q.dtype == DType::kFloat8E4M3 && problem->out_dtype == DType::kFloat8E4M3) {
    p.out.dtype = to_dtype(out, "bfloat16, float16, float32");
  } else {
    check_dtype(out, to_dlpack(p.out.dtype));
  }
  check_last_stride(out);
  set_view(out, dims_of(problem->layout), problem->out.ndim == 3, &p.out);
}

void set_lse(const Tensor& lse, Problem* problem) {
  AttentionParams& p = problem->params;
  check_shape(lse, problem->lse, "(batch, num_heads, seqlen_q)");
  check_last_stride(lse);
  p.lse.data = static_cast<float*>(lse.data);
  p.lse.batch_stride = lse.ndim == 3 ? lse.strides[0] : 0;
  p.lse.head_stride = lse.strides[lse.ndim - 2];
}

}  // namespace dlattn::python
