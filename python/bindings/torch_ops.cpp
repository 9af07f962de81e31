#include "torch_ops.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <string_view>
#include <type_traits>
#include <vector>

#include "errors.h"
#include "merge.h"
#include "problem.h"
#include "torch_arguments.h"
#include "torch_functions.h"

namespace dlattn::python {
namespace {

using torch_abi::Value;

// Torch runs its operators without the GIL, on any thread: nothing below that serves them touches
// Python.

// The operators' arguments, which must be those of the schemas in dlattn/integrations/torch/ops.py.
constexpr std::string_view kTensors[] = {"Tensor q", "Tensor k", "Tensor v"};
constexpr std::string_view kVarlenTensors[] = {
    "Tensor q",
    "Tensor k",
    "Tensor v",
    "Tensor cu_seqlens_q",
    "Tensor cu_seqlens_k",
    "int max_seqlen_q",
    "int max_seqlen_k",
    "Optional[Tensor] seqused_k",
};
// Behind those.
constexpr std::string_view kOptions[] = {
    "Optional[Tensor] bias",
    "Optional[Tensor] mask",
    "Optional[Tensor] alibi_slopes",
    "Optional[Tensor] sinks",
    "int causal",
    "Optional[float] scale",
    "int window_left",
    "int window_right",
    "float softcap",
    "Optional[str] precision",
    "bool bhsd",
    "bool batch_invariant",
};
constexpr std::string_view kOut[] = {"Tensor out"};
constexpr std::string_view kParts[] = {"List[Tensor] outs", "List[Tensor] lses"};

// Indices of the options, behind where they begin.
enum Option {
  kBias,
  kMask,
  kAlibiSlopes,
  kSinks,
  kCausal,
  kScale,
  kWindowLeft,
  kWindowRight,
  kSoftcap,
  kPrecision,
  kBhsd,
  kBatchInvariant,
};

constexpr Signature signature(bool varlen, bool with_out) {
  Signature made;
  if (varlen) made.add(kVarlenTensors);
  if (!varlen) made.add(kTensors);
  made.add(kOptions);
  if (with_out) made.add(kOut);
  return made;
}

constexpr Signature merge_signature() {
  Signature made;
  made.add(kParts);
  return made;
}

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

// The numbers among an operator's arguments; its options begin at `at`.
void read_numbers(const Arguments& arguments, int at, bool varlen, Problem* problem) {
  AttentionParams& p = problem->params;
  p.causal = causal_of(arguments.integer(at + kCausal));
  if (varlen) {
    p.seqlen_q = count_of(arguments.integer(5), "max_seqlen_q");
    p.seqlen_k = count_of(arguments.integer(6), "max_seqlen_k");
  }
  if (arguments.given(at + kScale)) p.softmax_scale = arguments.number(at + kScale);
  p.window_left = window_of(arguments.integer(at + kWindowLeft));
  p.window_right = window_of(arguments.integer(at + kWindowRight));
  p.softcap = arguments.number(at + kSoftcap);
  if (arguments.given(at + kPrecision)) p.precision = precision_of(arguments.text(at + kPrecision));
  problem->layout = arguments.flag(at + kBhsd) ? Layout::kBhsd : Layout::kBshd;
  problem->options.batch_invariant = arguments.flag(at + kBatchInvariant);
  problem->return_lse = true;
}

// The tensors that a call reads.
std::vector<Tensor> describe_tensors(const Arguments& arguments, int at, bool varlen) {
  std::vector<Tensor> tensors;
  tensors.reserve(10);
  const auto add = [&](int i, const char* name) {
    if (!arguments.given(i)) return;
    tensors.push_back(describe(arguments.tensor(i), name));
    check_device(name, tensors.back().device, tensors.front().device, "q");
  };
  add(0, "q");
  add(1, "k");
  add(2, "v");
  if (varlen) {
    add(3, "cu_seqlens_q");
    add(4, "cu_seqlens_k");
    add(7, "seqused_k");
  }
  add(at + kBias, "bias");
  add(at + kMask, "mask");
  add(at + kAlibiSlopes, "alibi_slopes");
  add(at + kSinks, "sinks");
  return tensors;
}

// Gives a plan the memory of torch's that it asks for. It may be let go of when the work is
// enqueued: what gets it next runs behind that, on the same stream.
struct Workspace {
  Device device;
  OwnedTensor memory;

  WorkspaceAllocator allocator() {
    return {[](void* self, std::int64_t bytes) {
              auto& workspace = *static_cast<Workspace*>(self);
              const std::int64_t floats = bytes / size_of(DType::kFloat32);
              workspace.memory =
                  empty_tensor("workspace", &floats, 1, DType::kFloat32, workspace.device);
              return describe(workspace.memory.get(), "workspace", true).data;
            },
            this};
  }
};

void* stream_of(Device device) {
  return device.type == DeviceType::kCuda ? current_cuda_stream(device) : nullptr;
}

// Runs an operator of attention: its results are out and lse, or lse alone if out is given.
void run(const Signature& signature, bool varlen, bool with_out, Value* stack) {
  const Arguments arguments(signature, stack);
  const int at = static_cast<int>(varlen ? std::size(kVarlenTensors) : std::size(kTensors));
  Problem problem;
  AttentionParams& p = problem.params;
  read_numbers(arguments, at, varlen, &problem);
  const std::vector<Tensor> tensors = describe_tensors(arguments, at, varlen);
  p.device = tensors.front().device;
  read_tensors(tensors, &problem);
  if (!arguments.given(at + kScale)) p.softmax_scale = default_scale(p);

  OwnedTensor out;
  if (with_out) {
    const Tensor given = describe(arguments.tensor(signature.count - 1), "out", true);
    check_device("out", given.device, p.device, "q");
    set_out(given, &problem);
  } else {
    out = empty_tensor("out", problem.out.sizes, problem.out.ndim, p.out.dtype, p.device);
    set_out(describe(out.get(), "out", true), &problem);
  }
  OwnedTensor lse =
      empty_tensor("lse", problem.lse.sizes, problem.lse.ndim, DType::kFloat32, p.device);
  set_lse(describe(lse.get(), "lse", true), &problem);
  Workspace workspace{p.device, {}};
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
  const std::vector<torch_abi::Tensor> parts = arguments.tensors(0);
  const Device device = parts.empty() ? Device{} : describe(parts[0], "outs").device;
  const std::vector<Tensor> outs = describe_parts(parts, "outs", device);
  const std::vector<Tensor> lses = describe_parts(arguments.tensors(1), "lses", device);
  Merge merge = read_parts(outs, lses, Layout::kBshd, device);
  OwnedTensor out = empty_tensor("out", merge.out.sizes, 4, merge.params.out.dtype, device);
  OwnedTensor lse = empty_tensor("lse", merge.lse.sizes, 3, DType::kFloat32, device);
  set_results(describe(out.get(), "out", true), describe(lse.get(), "lse", true), &merge);
  dlattn::merge_states(merge.params, stream_of(device));
  stack[0] = reinterpret_cast<Value>(out.release());
  stack[1] = reinterpret_cast<Value>(lse.release());
}

// An array, not a std::string: a thread that ends destroys nothing, so that operators can be called
// until the process has ended.
struct Failure {
  const char* kind = nullptr;  // of the exception's class in Python
  char message[4096] = "";     // cut off where it ends

  void set(const char* name, std::string_view text) {
    kind = name;
    message[text.copy(message, sizeof message - 1)] = '\0';
  }
};
thread_local Failure failure;
static_assert(std::is_trivially_destructible_v<Failure>);

// Keeps the failure, if `code` throws.
template <typename Code>
void catch_failure(Code&& code) noexcept {
  failure.kind = nullptr;
  try {
    code();
  } catch (const UnsupportedError& error) {
    failure.set("UnsupportedError", error.what());
  } catch (const DeviceError& error) {
    failure.set("DeviceError", error.what());
  } catch (const nb::builtin_exception& error) {  // thrown by wrong_type
    failure.set("TypeError", error.what());
  } catch (const std::bad_alloc&) {
    failure.set("MemoryError", "out of memory");
  } catch (const std::exception& error) {
    failure.set("RuntimeError", error.what());
  }
}

// Torch throws the exception that leaves this, and no object of this module's is alive then: its
// C++ runtime and this module's need not be the same.
template <typename Code>
void run_or_throw(Code&& code) {
  catch_failure(code);
  if (failure.kind) torch_functions.check(false, "dlattn", "torch_ops.cpp", 0, failure.message);
}

template <bool kVarlen, bool kWithOut>
constexpr Signature kSignature = signature(kVarlen, kWithOut);
constexpr Signature kMergeSignature = merge_signature();

template <bool kVarlen, bool kWithOut>
void attention_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  run_or_throw([&] { run(kSignature<kVarlen, kWithOut>, kVarlen, kWithOut, stack); });
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
    {"attention", attention_kernel<false, false>, kSignature<false, false>},
    {"attention_out", attention_kernel<false, true>, kSignature<false, true>},
    {"attention_varlen", attention_kernel<true, false>, kSignature<true, false>},
    {"attention_varlen_out", attention_kernel<true, true>, kSignature<true, true>},
    {"merge_states", merge_kernel, kMergeSignature},
};

bool same_arguments(const Signature& signature, nb::handle schema) {
  if (nb::len(schema) != static_cast<std::size_t>(signature.count)) return false;
  for (int i = 0; i < signature.count; ++i) {
    if (text(nb::object(schema[i])) != signature.arguments[i]) return false;
  }
  return true;
}

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

nb::object torch_ops_failure() {
  if (!failure.kind) return nb::none();
  const nb::object message = nb::steal<nb::object>(PyUnicode_DecodeUTF8(
      failure.message, static_cast<Py_ssize_t>(std::strlen(failure.message)), "backslashreplace"));
  if (!message.is_valid()) throw nb::python_error();
  return nb::make_tuple(failure.kind, message);
}

}  // namespace dlattn::python
