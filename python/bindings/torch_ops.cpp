#include "torch_ops.h"

#include <algorithm>
#include <vector>

#include "errors.h"
#include "merge.h"
#include "problem.h"
#include "torch_arguments.h"
#include "torch_functions.h"
#include "torch_kernel.h"

namespace dlattn::python {
namespace {

using torch_abi::Value;

// The operators' arguments, which must be those of the schemas in dlattn/integrations/torch/ops.py.
constexpr Signature signature(bool varlen, bool with_out) {
  Signature made;
  for (const char* name : {"q", "k", "v"}) made.add("Tensor", name);
  if (varlen) {
    for (const char* name : {"cu_seqlens_q", "cu_seqlens_k"}) made.add("Tensor", name);
    for (const char* name : {"max_seqlen_q", "max_seqlen_k"}) made.add("int", name);
    made.add("Optional[Tensor]", "seqused_k");
  }
  for (const core::Operand& operand : core::kForwardOperands) {
    if (operand.has(core::kInTorch)) made.add("Optional[Tensor]", operand.name);
  }
  made.add("int", "causal");
  made.add("Optional[float]", "scale");
  for (const char* name : {"window_left", "window_right"}) made.add("int", name);
  made.add("float", "softcap");
  made.add("Optional[str]", "precision");
  for (const char* name : {"bhsd", "batch_invariant"}) made.add("bool", name);
  if (with_out) made.add("Tensor", "out");
  return made;
}

constexpr Signature merge_signature() {
  Signature made;
  for (const char* name : {"outs", "lses"}) made.add("List[Tensor]", name);
  return made;
}

// An operator of attention, with where its settings stand among its arguments; -1: it has none.
struct AttentionOperator {
  Signature signature;
  int max_seqlen_q, max_seqlen_k, causal, scale, window_left, window_right, softcap, precision,
      bhsd, batch_invariant, out;

  constexpr AttentionOperator(bool varlen, bool with_out)
      : signature(python::signature(varlen, with_out)),
        max_seqlen_q(signature.index("max_seqlen_q")),
        max_seqlen_k(signature.index("max_seqlen_k")),
        causal(signature.index("causal")),
        scale(signature.index("scale")),
        window_left(signature.index("window_left")),
        window_right(signature.index("window_right")),
        softcap(signature.index("softcap")),
        precision(signature.index("precision")),
        bhsd(signature.index("bhsd")),
        batch_invariant(signature.index("batch_invariant")),
        out(signature.index("out")) {}
};

std::int64_t count_of(std::int64_t count, const char* name) {
  if (count < 0 || count > INT32_MAX)
    unsupported(name, " is ", count, "; accepted: an int from 0 to ", INT32_MAX);
  return count;
}

Causal causal_of(std::int64_t causal) {
  switch (causal) {
    case 0:
      return Causal::kNone;
    case 1:
      return Causal::kBottomRight;
    case 2:
      return Causal::kTopLeft;
    default:
      unsupported("causal is ", causal, "; accepted: 0 (no), 1 (bottom-right), 2 (top-left)");
  }
}

Precision precision_of(const std::string& name) {
  for (const Precision precision : {Precision::kInt8Fp8, Precision::kInt8Fp16, Precision::kFp8}) {
    if (name == to_string(precision)) return precision;
  }
  unsupported("precision is ", shortened("'" + name + "'"), "; accepted: ", kPrecisions);
}

std::int64_t window_of(std::int64_t tokens) {
  return tokens < 0 ? -1 : std::min(tokens, kMaxWindow);
}

void read_settings(const AttentionOperator& op, const Arguments& arguments, Problem* problem) {
  AttentionParams& p = problem->params;
  p.causal = causal_of(arguments.integer(op.causal));
  if (op.max_seqlen_q >= 0) {
    p.seqlen_q = count_of(arguments.integer(op.max_seqlen_q), "max_seqlen_q");
    p.seqlen_k = count_of(arguments.integer(op.max_seqlen_k), "max_seqlen_k");
  }
  if (arguments.given(op.scale)) p.softmax_scale = arguments.number(op.scale);
  p.window_left = window_of(arguments.integer(op.window_left));
  p.window_right = window_of(arguments.integer(op.window_right));
  p.softcap = arguments.number(op.softcap);
  if (arguments.given(op.precision)) p.precision = precision_of(arguments.text(op.precision));
  problem->layout = arguments.flag(op.bhsd) ? Layout::kBhsd : Layout::kBshd;
  problem->options.batch_invariant = arguments.flag(op.batch_invariant);
  problem->return_lse = true;
}

// The tensors that a call reads.
std::vector<Tensor> describe_tensors(const AttentionOperator& op, const Arguments& arguments) {
  std::vector<Tensor> tensors;
  tensors.reserve(Signature::kMaxArguments);
  for (int i = 0; i < op.signature.count; ++i) {
    const Signature::Argument& argument = op.signature.arguments[i];
    if (!argument.is_tensor() || i == op.out || !arguments.given(i)) continue;
    tensors.push_back(describe(arguments.tensor(i), argument.name));
    check_device(argument.name, tensors.back().device, tensors.front().device, "q");
  }
  return tensors;
}

// Runs an operator of attention: its results are out and lse, or lse alone if out is given.
void run(const AttentionOperator& op, Value* stack) {
  const Arguments arguments(op.signature, stack);
  const bool with_out = op.out >= 0;
  Problem problem;
  AttentionParams& p = problem.params;
  read_settings(op, arguments, &problem);
  const std::vector<Tensor> tensors = describe_tensors(op, arguments);
  p.device = tensors.front().device;
  read_tensors(tensors, &problem);
  if (!arguments.given(op.scale)) p.softmax_scale = default_scale(p);

  OwnedTensor out;
  if (with_out) {
    const Tensor given = describe(arguments.tensor(op.out), "out", true);
    check_device("out", given.device, p.device, "q");
    set_out(given, &problem);
  } else {
    out = empty_tensor("out", problem.out.sizes, problem.out.ndim, p.out.dtype, p.device);
    set_out(describe(out.get(), "out", true), &problem);
  }
  OwnedTensor lse =
      empty_tensor("lse", problem.lse.sizes, problem.lse.ndim, DType::kFloat32, p.device);
  set_lse(describe(lse.get(), "lse", true), &problem);
  TorchWorkspace workspace{p.device, {}};
  problem.options.workspace = workspace.allocator();
  forward(p, stream_of(p.device), problem.options);

  if (!with_out) *stack++ = reinterpret_cast<Value>(out.release());
  *stack = reinterpret_cast<Value>(lse.release());
}

std::vector<Tensor> describe_parts(const std::vector<torch_abi::Tensor>& parts, const char* name,
                                   Device device) {
  std::vector<Tensor> tensors;
  tensors.reserve(parts.size());
  for (const torch_abi::Tensor part : parts) {
    tensors.push_back(describe(part, name));
    check_device(name, tensors.back().device, device, "outs");
  }
  return tensors;
}

void run_merge(const Signature& signature, Value* stack) {
  const Arguments arguments(signature, stack);
  const std::vector<torch_abi::Tensor> parts = arguments.tensors(signature.index("outs"));
  const Device device = parts.empty() ? Device{} : describe(parts[0], "outs").device;
  const std::vector<Tensor> outs = describe_parts(parts, "outs", device);
  const std::vector<Tensor> lses =
      describe_parts(arguments.tensors(signature.index("lses")), "lses", device);
  Merge merge = read_parts(outs, lses, Layout::kBshd, device);
  OwnedTensor out = empty_tensor("out", merge.out.sizes, 4, merge.params.out.dtype, device);
  OwnedTensor lse = empty_tensor("lse", merge.lse.sizes, 3, DType::kFloat32, device);
  set_results(describe(out.get(), "out", true), describe(lse.get(), "lse", true), &merge);
  dlattn::merge_states(merge.params, stream_of(device));
  stack[0] = reinterpret_cast<Value>(out.release());
  stack[1] = reinterpret_cast<Value>(lse.release());
}

template <bool kVarlen, bool kWithOut>
constexpr AttentionOperator kAttention(kVarlen, kWithOut);
constexpr Signature kMergeSignature = merge_signature();

template <bool kVarlen, bool kWithOut>
void attention_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  run_or_throw([&] { run(kAttention<kVarlen, kWithOut>, stack); });
}

void merge_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  run_or_throw([&] { run_merge(kMergeSignature, stack); });
}

struct Operator {
  const char* name;
  torch_abi::Kernel* kernel;
  const Signature& signature;
};
constexpr Operator kOperators[] = {
    {"attention", attention_kernel<false, false>, kAttention<false, false>.signature},
    {"attention_out", attention_kernel<false, true>, kAttention<false, true>.signature},
    {"attention_varlen", attention_kernel<true, false>, kAttention<true, false>.signature},
    {"attention_varlen_out", attention_kernel<true, true>, kAttention<true, true>.signature},
    {"merge_states", merge_kernel, kMergeSignature},
};

// Those that are registered. Never deleted when the process ends: torch may be gone by then.
auto& libraries = *new std::vector<torch_abi::Library>;

std::string register_kernels(const std::string& folder, const std::string& backend,
                             const nb::dict& schemas) {
  for (const Operator& op : kOperators) {
    if (!schemas.contains(op.name) || !same_arguments(op.signature, schemas[op.name]))
      return concat("the native ", op.name, " has other arguments");
  }
  if (std::string why = load_torch(folder); !why.empty()) return why;
  if (backend == "CUDA" && !torch_functions.get_current_cuda_stream)
    return "libtorch_cuda has no function aoti_torch_get_current_cuda_stream";
  torch_abi::Library library = nullptr;
  if (torch_functions.new_library("dlattn", backend.c_str(), "torch_ops.cpp", 0, &library))
    return "torch made no library of kernels";
  for (const Operator& op : kOperators) {
    if (!torch_functions.add_kernel(library, op.name, op.kernel, torch_abi::kVersion)) continue;
    torch_functions.delete_library(library);
    return concat("torch did not take the native ", op.name);
  }
  libraries.push_back(library);
  return {};
}

}  // namespace

nb::str register_torch_ops(nb::handle folder, nb::handle backend, const nb::dict& schemas) {
  const std::string why = register_kernels(text(folder), text(backend), schemas);
  return nb::str(why.data(), why.size());
}

void unregister_torch_ops() {
  for (const torch_abi::Library library : libraries) torch_functions.delete_library(library);
  libraries.clear();
}

}  // namespace dlattn::python
