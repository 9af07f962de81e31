#include "problem.h"

#include <cmath>
#include <iterator>
#include <string>

#include "arguments.h"
#include "cache.h"
#include "errors.h"
#include "gil.h"
#include "qkv.h"
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
  check_writable(tensor);
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
  const bool varlen = problem->lse.ndim == 2;
  check_shape(lse, problem->lse, varlen ? "(num_heads, total_q)" : "(batch, num_heads, seqlen_q)");
  check_last_stride(lse);
  p.lse.data = static_cast<float*>(lse.data);
  p.lse.batch_stride = lse.ndim == 3 ? lse.strides[0] : 0;
  p.lse.head_stride = lse.strides[lse.ndim - 2];
}

}  // namespace dlattn::python
