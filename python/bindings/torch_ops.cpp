#include "torch_ops.h"

#include <vector>

#include "errors.h"
#include "merge.h"
#include "problem.h"
#include "torch_arguments.h"
#include "torch_attention.h"
#include "torch_functions.h"
#include "torch_kernel.h"

namespace dlattn::python {
namespace {

using torch_abi::Value;

constexpr Signature signature(bool varlen, bool with_out) {
  Signature made;
  for (const char* name : {"q", "k", "v"}) made.add("Tensor", name);
  if (varlen) add_lengths(&made);
  add_scores(&made);
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

// Runs an operator of attention: its results are out and lse, or lse alone if out is given.
void run(const AttentionOperator& op, Value* stack) {
  const Arguments arguments(op.signature, stack);
  const bool with_out = op.out >= 0;
  Problem problem;
  AttentionParams& p = problem.params;
  read_inputs(op, arguments, &problem);

  OwnedTensor out;
  if (with_out) {
    const Tensor given = describe(arguments.tensor(op.out), "out", true);
    check_device("out", given.device, p.device, "q");
    set_out(given, &problem);
  } else {
    Tensor made;
    out = empty_tensor("out", problem.out.sizes, problem.out.ndim, p.out.dtype, p.device, &made);
    set_out(made, &problem);
  }
  Tensor made;
  OwnedTensor lse =
      empty_tensor("lse", problem.lse.sizes, problem.lse.ndim, DType::kFloat32, p.device, &made);
  set_lse(made, &problem);
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
  Tensor new_out, new_lse;
  OwnedTensor out =
      empty_tensor("out", merge.out.sizes, 4, merge.params.out.dtype, device, &new_out);
  OwnedTensor lse = empty_tensor("lse", merge.lse.sizes, 3, DType::kFloat32, device, &new_lse);
  set_results(new_out, new_lse, &merge);
  dlattn::merge_states(merge.params, stream_of(device));
  stack[0] = reinterpret_cast<Value>(out.release());
  stack[1] = reinterpret_cast<Value>(lse.release());
}

template <bool kVarlen, bool kWithOut>
constexpr AttentionOperator kAttention(signature(kVarlen, kWithOut));
constexpr Signature kMergeSignature = merge_signature();

template <bool kVarlen, bool kWithOut>
void attention_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  run_or_throw([&] { run(kAttention<kVarlen, kWithOut>, stack); });
}

void merge_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  run_or_throw([&] { run_merge(kMergeSignature, stack); });
}

const TorchOperator kOperators[] = {
    {"attention", attention_kernel<false, false>, kAttention<false, false>.signature},
    {"attention_out", attention_kernel<false, true>, kAttention<false, true>.signature},
    {"attention_varlen", attention_kernel<true, false>, kAttention<true, false>.signature},
    {"attention_varlen_out", attention_kernel<true, true>, kAttention<true, true>.signature},
    {"merge_states", merge_kernel, kMergeSignature},
    kBackwardOperators[0],
    kBackwardOperators[1],
};

const TorchOperator* find_operator(const std::string& name) {
  for (const TorchOperator& op : kOperators) {
    if (name == op.name) return &op;
  }
  return nullptr;
}

// Those that are registered. Never deleted when the process ends: torch may be gone by then.
auto& libraries = *new std::vector<torch_abi::Library>;

std::string register_kernels(const std::string& folder, const std::string& backend,
                             const nb::dict& schemas) {
  std::vector<const TorchOperator*> wanted;
  for (const auto [name, schema] : schemas) {
    const TorchOperator* const op = find_operator(text(name));
    if (!op || !same_arguments(op->signature, schema))
      return concat("the native ", text(name), " has other arguments");
    wanted.push_back(op);
  }
  if (std::string why = load_torch(folder); !why.empty()) return why;
  if (backend == "CUDA" && !torch_functions.get_current_cuda_stream)
    return "libtorch_cuda has no function aoti_torch_get_current_cuda_stream";
  torch_abi::Library library = nullptr;
  if (torch_functions.new_library("dlattn", backend.c_str(), "torch_ops.cpp", 0, &library))
    return "torch made no library of kernels";
  for (const TorchOperator* const op : wanted) {
    if (!torch_functions.add_kernel(library, op->name, op->kernel, torch_abi::kVersion)) continue;
    torch_functions.delete_library(library);
    return concat("torch did not take the native ", op->name);
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
