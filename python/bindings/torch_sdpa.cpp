#include "torch_sdpa.h"

#include <array>
#include <atomic>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "gil.h"
#include "torch_kernel.h"
#include "torch_sdpa_kernels.h"

namespace dlattn::python {
namespace {

using torch_abi::Value;

// Whose kernels compute.

enum class Whose { kAuto, kDlattn, kTorch };
constexpr const char* kWhose[] = {"auto", "dlattn", "torch"};

std::atomic<bool> serving{false};
std::atomic<Whose> whose_gradients{Whose::kAuto};

constexpr const SdpaKernel* kSdpaKernels[] = {
    &kSdpaForCpu,        &kSdpaForCpuBackward, &kSdpaFlash,
    &kSdpaFlashBackward, &kSdpaEfficient,      &kSdpaEfficientBackward,
    &kSdpaCudnn,         &kSdpaCudnnBackward,  &kSdpaPackedFlashBackward};
constexpr int kNumSdpaKernels = std::size(kSdpaKernels);
std::atomic<std::int64_t> served[kNumSdpaKernels];

// Returns false where the call is left to torch.
bool compute(int which, const Arguments& arguments, SdpaResults& results) {
  const SdpaKernel& kernel = *kSdpaKernels[which];
  const Whose whose = kernel.may_be_faster ? whose_gradients.load() : Whose::kDlattn;
  const bool if_faster = whose == Whose::kAuto;
  if (whose == Whose::kTorch || (if_faster && !kernel.may_be_faster(arguments))) return false;
  if (!kernel.compute) unsupported("the kernel is in Python");
  if (!kernel.compute(arguments, if_faster, results)) return false;
  served[which].fetch_add(1, std::memory_order_relaxed);
  return true;
}

PyObject* count_refused_in_python = nullptr;  // never let go of: calls may outlive the interpreter

void count_refused(const char* name, const std::string& reason) {
  with_gil_on_any_thread([&] {
    PyObject* const counted =
        PyObject_CallFunction(count_refused_in_python, "ss", name, reason.c_str());
    if (!counted) PyErr_WriteUnraisable(count_refused_in_python);
    Py_XDECREF(counted);
  });
}

// Returns false where the call is left to torch.
bool serve(int which, const Arguments& arguments, SdpaResults& results) {
  std::string reason;
  try {
    return compute(which, arguments, results);
  } catch (const UnsupportedError& error) {  // before anything was launched
    reason = error.what();
  } catch (const nb::builtin_exception& error) {
    reason = error.what();
  }
  count_refused(kSdpaKernels[which]->name, reason);
  return false;
}

// The kernel whose own one of torch's this thread is in: that may call another operator.
thread_local const SdpaKernel* in_torchs_own = nullptr;

// A torch whose function calls the operator rather than the kernel would call this kernel again.
void hand_on(const SdpaKernel& kernel, const Arguments& arguments, SdpaResults& results) {
  if (in_torchs_own == &kernel) throw std::runtime_error("torch's own kernel is not reached");
  struct InTorchsOwn {
    const SdpaKernel* const before = in_torchs_own;
    explicit InTorchsOwn(const SdpaKernel* kernel) { in_torchs_own = kernel; }
    ~InTorchsOwn() { in_torchs_own = before; }
  } const inside(&kernel);
  kernel.own(arguments, results);
}

void serve_or_call_torch(int which, Value* stack) {
  run_or_throw([&] {
    const SdpaKernel& kernel = *kSdpaKernels[which];
    const Arguments arguments(kernel.op.signature, stack);
    SdpaResults results;
    if (!serving || !serve(which, arguments, results)) hand_on(kernel, arguments, results);
    put_on(stack, kernel.num_results, results);
  });
}

// Returns false where the arguments stay on the stack: the kernel in Python meets the reason too,
// and computes, or raises what torch's callers expect.
bool serve_or_leave(int which, Value* stack) noexcept {
  const SdpaKernel& kernel = *kSdpaKernels[which];
  Arguments arguments(kernel.op.signature, stack);
  try {
    SdpaResults results;
    const bool is_served = serving && compute(which, arguments, results);
    if (is_served || kernel.own) {
      if (!is_served) hand_on(kernel, arguments, results);
      put_on(stack, kernel.num_results, results);
      return true;
    }
  } catch (...) {
  }
  arguments.give_back();
  return false;
}

PyObject* raise_in_python = nullptr;  // as count_refused_in_python

// Throws torch's own exception of what a kernel in Python raised last on this thread. No object of
// this module's but that of the GIL is alive then, as in run_or_throw.
void throw_what_python_raised() {
  const GilOnAnyThread gil;
  throw_from_python(raise_in_python);
}

// Takes the results of a kernel in Python, whose order is that of in_passing_order() in
// sdpa_native.py. Returns false if it failed: it returns nothing then, as torch before 2.13 prints
// what goes through its C ABI.
bool take_results(int num_results, Value* stack) {
  const bool has_numbers = num_results == kMaxSdpaResults;
  if (has_numbers) std::swap(stack[3], stack[4]);
  bool defined = false;
  torch_functions.is_defined(reinterpret_cast<torch_abi::Tensor>(stack[0]), &defined);
  for (int i = 0; !defined && i < num_results; ++i) {
    const bool is_number = has_numbers && (i == 4 || i == 5);
    if (!is_number) torch_functions.delete_tensor(reinterpret_cast<torch_abi::Tensor>(stack[i]));
  }
  return defined;
}

void serve_or_call_python(int which, Value* stack) {
  if (serve_or_leave(which, stack)) return;
  call_python(kSdpaKernels[which]->name, kSdpaKernels[which]->num_results, stack);
}

template <int which>
void sdpa_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  if (is_of_cuda(*kSdpaKernels[which])) {
    serve_or_call_python(which, stack);
  } else {
    serve_or_call_torch(which, stack);
  }
}
template <int... which>
constexpr std::array<torch_abi::Kernel*, sizeof...(which)> functions(
    std::integer_sequence<int, which...>) {
  return {sdpa_kernel<which>...};
}
constexpr auto kFunctions = functions(std::make_integer_sequence<int, kNumSdpaKernels>());

auto& sdpa_libraries = *new std::vector<torch_abi::Library>;  // as those of torch_ops.cpp

bool has_all_functions() {
  const torch_abi::Functions& torch = torch_functions;
  return torch.is_defined && torch.new_undefined && torch.new_handle && torch.copy && torch.call &&
         torch.fill && torch.is_grad_enabled && torch.context && torch.are_algorithms_deterministic;
}

const char* what_kernel_lacks(const SdpaKernel& kernel, const std::string& key) {
  if (is_of_cuda(kernel)) return what_torch_lacks(key);
  const torch_abi::Functions& torch = torch_functions;
  const bool has_own = torch.last_error && torch.new_value && torch.attention_for_cpu &&
                       torch.attention_for_cpu_backward;
  return has_all_functions() && has_own ? nullptr : "torch is older than 2.13";
}

// The kernel of an operator for a key of torch's dispatcher; -1: there is none.
int find_kernel(const std::string& name, const std::string& key) {
  for (int i = 0; i < kNumSdpaKernels; ++i) {
    const SdpaKernel& kernel = *kSdpaKernels[i];
    // Those of CUDA serve tensors of the CPU too, for tests.
    const bool is_for_key = key == kernel.backend || (key == "CPU" && is_of_cuda(kernel));
    if (name == kernel.name && is_for_key) return i;
  }
  return -1;
}

std::string register_sdpa_kernels(const std::string& folder, const std::string& key,
                                  const nb::dict& schemas) {
  for (const auto [name, schema] : schemas) {
    const int which = find_kernel(text(name), key);
    if (which < 0) return "an operator has no native kernel";
    const SdpaKernel& kernel = *kSdpaKernels[which];
    if (!same_arguments(kernel.op.signature, schema))
      return concat("the native ", kernel.name, " has other arguments");
    if (std::string why = load_torch(folder); !why.empty()) return why;
    if (const char* const why = what_kernel_lacks(kernel, key)) return why;
    std::string why =
        add_torch_kernel("aten", key, kernel.name, kFunctions[which], &sdpa_libraries);
    if (!why.empty()) return why;
  }
  return {};
}

// The kernel of dlattn::_raise(Tensor x) -> Tensor fails as those whose call fails in Python.
constexpr Signature raise_signature() {
  Signature made;
  made.add("Tensor", "x");
  return made;
}
constexpr Signature kRaise = raise_signature();

void raise_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  {
    const Arguments arguments(kRaise, stack);
  }
  throw_what_python_raised();
}

}  // namespace

void put_on(Value* stack, int num_results, SdpaResults& results) {
  for (int i = 0; i < num_results; ++i) stack[i] = results[i].release();
}

void call_python(const char* name, int num_results, Value* stack) {
  char full_name[128] = "dlattn::";
  std::strncat(full_name, name, sizeof full_name - std::strlen(full_name) - 1);
  if (torch_functions.call(full_name, "", stack, torch_abi::kVersion) ||
      !take_results(num_results, stack))
    throw_what_python_raised();
}

const char* what_torch_lacks(const std::string& key) {
  if (!has_all_functions() || !raise_in_python) return "torch lacks a function for it";
  const bool has_device = key != "CUDA" || torch_functions.get_current_cuda_stream;
  return has_device ? nullptr : "torch has no CUDA";
}

std::string add_torch_kernel(const char* operators, const std::string& key, const char* name,
                             torch_abi::Kernel* kernel,
                             std::vector<torch_abi::Library>* libraries) {
  torch_abi::Library library = nullptr;
  if (torch_functions.new_library(operators, key.c_str(), "torch_sdpa.cpp", 0, &library))
    return "torch made no library of kernels";
  if (torch_functions.add_kernel(library, name, kernel, torch_abi::kVersion)) {
    torch_functions.delete_library(library);
    return concat("torch did not take the native ", name);
  }
  libraries->push_back(library);
  return {};
}

void check_own_error(torch_abi::Error error) {
  if (error) throw std::runtime_error(torch_functions.last_error());
}

nb::str register_torch_sdpa(nb::handle folder, nb::handle key, const nb::dict& schemas,
                            nb::handle count_refused) {
  if (!count_refused_in_python) count_refused_in_python = count_refused.inc_ref().ptr();
  const std::string why = register_sdpa_kernels(text(folder), text(key), schemas);
  return nb::str(why.data(), why.size());
}

nb::str register_torch_raise(nb::handle folder, nb::handle raise) {
  if (!raise_in_python) raise_in_python = raise.inc_ref().ptr();
  std::string why = load_torch(text(folder));
  if (why.empty() && !torch_functions.to_scalar) why = "libtorch_python lacks a function for it";
  if (why.empty()) why = add_torch_kernel("dlattn", "CPU", "_raise", raise_kernel, &sdpa_libraries);
  return nb::str(why.data(), why.size());
}

void unregister_torch_sdpa() {
  for (const torch_abi::Library library : sdpa_libraries) torch_functions.delete_library(library);
  sdpa_libraries.clear();
}

void serve_torch_sdpa(bool on, nb::handle gradients) {
  const std::string name = text(gradients);
  for (const Whose whose : {Whose::kAuto, Whose::kDlattn, Whose::kTorch}) {
    if (name == kWhose[static_cast<int>(whose)]) whose_gradients = whose;
  }
  serving = on;
}

nb::dict torch_sdpa_served(bool reset) {
  nb::dict found;
  for (int i = 0; i < kNumSdpaKernels; ++i) {
    const std::int64_t count = reset ? served[i].exchange(0) : served[i].load();
    if (count > 0) found[kSdpaKernels[i]->name] = count;
  }
  return found;
}

bool torch_gradients_are_as_fast(nb::handle torchs, nb::handle kernel, bool has_bias,
                                 bool wants_dbias, bool deterministic, std::int64_t seqlen_q,
                                 std::int64_t head_dim) {
  const std::string peer = text(torchs), name = text(kernel);
  const GradientCall call{name, has_bias, wants_dbias, deterministic, seqlen_q, head_dim};
  for (std::size_t i = 0; i < std::size(kTorchKernels); ++i) {
    if (peer == kTorchKernels[i]) return is_as_fast(call, static_cast<TorchKernel>(i));
  }
  unsupported("torchs is ", shortened("'" + peer + "'"),
              "; accepted: 'flash', 'efficient', 'cudnn'");
}

}  // namespace dlattn::python
