#include "torch_sdpa.h"

#include <atomic>
#include <iterator>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "dlattn/backward.h"
#include "errors.h"
#include "gil.h"
#include "problem.h"
#include "torch_arguments.h"
#include "torch_functions.h"
#include "torch_kernel.h"

// The kernels have the arguments and results of torch's operators, as those in
// dlattn/integrations/torch/sdpa.py and sdpa_backward.py, which say what is served and why.
namespace dlattn::python {
namespace {

using torch_abi::Value;

constexpr int kMaxResults = 3;
using Results = OwnedTensor[kMaxResults];

// An operator of attention, with where its arguments stand; -1: it has none of that name.
struct SdpaOperator {
  Signature signature;
  int grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale;

  constexpr explicit SdpaOperator(const Signature& signature)
      : signature(signature),
        grad_out(signature.index("grad_out")),
        query(signature.index("query")),
        key(signature.index("key")),
        value(signature.index("value")),
        out(signature.index("out")),
        logsumexp(signature.index("logsumexp")),
        dropout_p(signature.index("dropout_p")),
        is_causal(signature.index("is_causal")),
        attn_mask(signature.index("attn_mask")),
        scale(signature.index("scale")) {}
};

constexpr Signature for_cpu_signature(bool backward) {
  Signature made;
  if (backward) made.add("Tensor", "grad_out");
  for (const char* name : {"query", "key", "value"}) made.add("Tensor", name);
  if (backward) {
    for (const char* name : {"out", "logsumexp"}) made.add("Tensor", name);
  }
  made.add("float", "dropout_p");
  made.add("bool", "is_causal");
  made.add("Optional[Tensor]", "attn_mask");
  made.add("Optional[float]", "scale");
  return made;
}

constexpr SdpaOperator kForCpu(for_cpu_signature(false));
constexpr SdpaOperator kForCpuBackward(for_cpu_signature(true));

// Autograd passes a mask that was not given as a tensor that is none.
bool has_mask(const SdpaOperator& op, const Arguments& arguments) {
  bool defined = false;
  if (!arguments.given(op.attn_mask)) return false;
  check_torch_error(torch_functions.is_defined(arguments.tensor(op.attn_mask), &defined),
                    "reading a tensor");
  return defined;
}

// The forward call, its tensors taken in; out and lse are left.
void read_forward(const SdpaOperator& op, const Arguments& arguments, Problem* problem) {
  AttentionParams& p = problem->params;
  if (arguments.number(op.dropout_p) != 0.0) unsupported("dropout_p is not 0");
  std::vector<Tensor> tensors;
  tensors.reserve(4);
  tensors.push_back(describe(arguments.tensor(op.query), "q"));
  if (same(tensors[0].dtype, to_dlpack(DType::kFloat64))) unsupported("query is float64");
  tensors.push_back(describe(arguments.tensor(op.key), "k"));
  tensors.push_back(describe(arguments.tensor(op.value), "v"));
  if (has_mask(op, arguments)) {
    const Tensor mask = describe(arguments.tensor(op.attn_mask), "bias");
    if (mask.dtype.code == dlpack::kBool || (mask.ndim != 2 && mask.ndim != 4))
      unsupported("attn_mask is bool, or has not 2 or 4 dimensions");
    tensors.push_back(mask);
  }
  p.device = tensors[0].device;
  for (const Tensor& tensor : tensors) check_device(tensor.name, tensor.device, p.device, "q");
  p.causal = arguments.flag(op.is_causal) ? Causal::kTopLeft : Causal::kNone;
  problem->layout = Layout::kBhsd;
  read_tensors(tensors, problem);
  p.softmax_scale = arguments.given(op.scale) ? arguments.number(op.scale) : default_scale(p);
}

// Whether every address from the first element to the last is that of one element.
bool is_dense(const Tensor& tensor) {
  if (tensor.num_elements() == 0) return false;
  std::int64_t reached = 1;
  for (bool found = true; found;) {
    found = false;
    for (int i = 0; i < tensor.ndim && !found; ++i) {
      found = tensor.shape[i] > 1 && tensor.strides[i] == reached;
      if (found) reached *= tensor.shape[i];
    }
  }
  return reached == tensor.num_elements();
}

// As torch.empty_like: the dimensions lie in memory in the order of those of `like`.
OwnedTensor empty_like(torch_abi::Tensor like) {
  const Tensor tensor = describe(like, "q");
  if (is_dense(tensor)) {
    return empty_strided("out", tensor.shape, tensor.strides, tensor.ndim,
                         to_dtype(tensor, "that of q"), tensor.device);
  }
  torch_abi::Tensor handle = nullptr;
  check_torch_error(torch_functions.new_handle(like, &handle), "taking a tensor");
  Value stack[6] = {reinterpret_cast<Value>(handle)};  // and no dtype, layout, device and others
  check_torch_error(torch_functions.call("aten::empty_like", "", stack, torch_abi::kVersion),
                    "allocating out");
  return OwnedTensor(reinterpret_cast<torch_abi::Tensor>(stack[0]));
}

// The log-sum-exp as torch's kernel of the CPU lays it out: the heads of a row side by side.
// Backward kernels take exp(score - lse), which must be 0 in rows that see nothing.
OwnedTensor log_sum_exp_by_row(const float* found, const AttentionParams& p) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::int64_t sizes[3] = {p.batch_size, p.num_heads, p.seqlen_q};
  const int order[3] = {0, 2, 1};
  OwnedTensor made = empty_tensor("lse", sizes, order, 3, DType::kFloat32, p.device);
  float* to = static_cast<float*>(describe(made.get(), "lse", true).data);
  for (std::int64_t b = 0; b < p.batch_size; ++b) {
    const float* const of_batch = found + b * p.num_heads * p.seqlen_q;
    for (std::int64_t row = 0; row < p.seqlen_q; ++row) {
      for (std::int64_t head = 0; head < p.num_heads; ++head) {
        const float lse = of_batch[head * p.seqlen_q + row];
        *to++ = lse == -kInfinity ? kInfinity : lse;
      }
    }
  }
  return made;
}

void compute_for_cpu(const Arguments& arguments, Results& results) {
  Problem problem;
  AttentionParams& p = problem.params;
  read_forward(kForCpu, arguments, &problem);
  results[0] = empty_like(arguments.tensor(kForCpu.query));
  set_out(describe(results[0].get(), "out", true), &problem);
  const std::unique_ptr<float[]> lse(new float[p.batch_size * p.num_heads * p.seqlen_q]);
  p.lse.data = lse.get();
  p.lse.batch_stride = p.num_heads * p.seqlen_q;
  p.lse.head_stride = p.seqlen_q;
  forward(p, nullptr, problem.options);
  results[1] = log_sum_exp_by_row(lse.get(), p);
}

// Lets out and the log-sum-exp be those of a forward call. Returns memory to keep, if rows of the
// latter had to be copied.
std::unique_ptr<float[]> read_results(const SdpaOperator& op, const Arguments& arguments,
                                      Problem* problem) {
  set_out(describe(arguments.tensor(op.out), "out"), problem);
  Tensor lse = describe(arguments.tensor(op.logsumexp), "lse");
  check_dtype(lse, kFloat32);
  std::unique_ptr<float[]> copied;
  if (lse.ndim == 3 && lse.strides[2] != 1) {
    check_shape(lse, problem->lse, "(batch, num_heads, seqlen_q)");
    copied.reset(new float[lse.num_elements()]);
    const auto* const from = static_cast<const float*>(lse.data);
    float* to = copied.get();
    for (std::int64_t b = 0; b < lse.shape[0]; ++b) {
      for (std::int64_t head = 0; head < lse.shape[1]; ++head) {
        const float* const rows = from + b * lse.strides[0] + head * lse.strides[1];
        for (std::int64_t row = 0; row < lse.shape[2]; ++row) *to++ = rows[row * lse.strides[2]];
      }
    }
    lse.data = copied.get();
    contiguous_strides(&lse);
  }
  set_lse(lse, problem);
  return copied;
}

// Lets dout be in out's dtype, its rows side by side: those of x.expand() may not be. Returns the
// tensor to keep, if it had to be copied.
OwnedTensor read_dout(torch_abi::Tensor given, const Problem& problem, BackwardParams* params) {
  const DType dtype = problem.params.out.dtype;
  Tensor dout = describe(given, "dout");
  const bool has_rows =
      dout.ndim == 0 || dout.shape[dout.ndim - 1] <= 1 || dout.strides[dout.ndim - 1] == 1;
  OwnedTensor copied;
  if (!has_rows || !same(dout.dtype, to_dlpack(dtype))) {
    copied = empty_tensor("dout", dout.shape, dout.ndim, dtype, dout.device);
    check_torch_error(torch_functions.copy(copied.get(), given, 0), "copying dout");
    dout = describe(copied.get(), "dout");
  }
  check_shape(dout, problem.out, "that of out");
  check_last_stride(dout);
  set_view(dout, dims_of(problem.layout), false, &params->dout);
  params->dout.data = dout.data;
  params->dout.dtype = dtype;
  return copied;
}

void compute_for_cpu_backward(const Arguments& arguments, Results& results) {
  constexpr const SdpaOperator& kOp = kForCpuBackward;
  Problem problem;
  BackwardParams params;
  read_forward(kOp, arguments, &problem);
  const std::unique_ptr<float[]> lse = read_results(kOp, arguments, &problem);
  const OwnedTensor dout = read_dout(arguments.tensor(kOp.grad_out), problem, &params);
  const int inputs[kMaxResults] = {kOp.query, kOp.key, kOp.value};
  const char* const names[kMaxResults] = {"dq", "dk", "dv"};
  MutableTensorView* const views[kMaxResults] = {&params.dq, &params.dk, &params.dv};
  for (int i = 0; i < kMaxResults; ++i) {
    const Tensor input = describe(arguments.tensor(inputs[i]), names[i]);
    const DType dtype = to_dtype(input, "that of q");
    const int rows_first[4] = {0, 2, 1, 3};
    results[i] = empty_tensor(names[i], input.shape, rows_first, 4, dtype, input.device);
    set_view(describe(results[i].get(), names[i], true), dims_of(problem.layout), false, views[i]);
    views[i]->dtype = dtype;
  }
  params.forward = problem.params;
  backward(params, nullptr, problem.options);
}

// torch's own kernels. Their errors are torch's in torch's words.

void check_own_error(torch_abi::Error error) {
  if (error) throw std::runtime_error(torch_functions.last_error());
}

struct OptionalArguments {
  torch_abi::Tensor mask;
  double scale;
  torch_abi::Tensor* mask_given;
  double* scale_given;

  OptionalArguments(const SdpaOperator& op, const Arguments& arguments)
      : mask(arguments.tensor(op.attn_mask)),
        scale(arguments.number(op.scale)),
        mask_given(has_mask(op, arguments) ? &mask : nullptr),
        scale_given(arguments.given(op.scale) ? &scale : nullptr) {}
};

void own_for_cpu(const Arguments& arguments, Results& results) {
  constexpr const SdpaOperator& kOp = kForCpu;
  OptionalArguments optional(kOp, arguments);
  torch_abi::Tensor made[2] = {};
  const torch_abi::Error error = torch_functions.attention_for_cpu(
      arguments.tensor(kOp.query), arguments.tensor(kOp.key), arguments.tensor(kOp.value),
      arguments.number(kOp.dropout_p), arguments.flag(kOp.is_causal), optional.mask_given,
      optional.scale_given, &made[0], &made[1]);
  check_own_error(error);
  for (int i = 0; i < 2; ++i) results[i] = OwnedTensor(made[i]);
}

void own_for_cpu_backward(const Arguments& arguments, Results& results) {
  constexpr const SdpaOperator& kOp = kForCpuBackward;
  OptionalArguments optional(kOp, arguments);
  torch_abi::Tensor made[3] = {};
  const torch_abi::Error error = torch_functions.attention_for_cpu_backward(
      arguments.tensor(kOp.grad_out), arguments.tensor(kOp.query), arguments.tensor(kOp.key),
      arguments.tensor(kOp.value), arguments.tensor(kOp.out), arguments.tensor(kOp.logsumexp),
      arguments.number(kOp.dropout_p), arguments.flag(kOp.is_causal), optional.mask_given,
      optional.scale_given, &made[0], &made[1], &made[2]);
  check_own_error(error);
  for (int i = 0; i < 3; ++i) results[i] = OwnedTensor(made[i]);
}

// Whose kernels compute.

enum class Whose { kAuto, kDlattn, kTorch };
constexpr const char* kWhose[] = {"auto", "dlattn", "torch"};

std::atomic<bool> serving{false};
std::atomic<Whose> whose_gradients{Whose::kAuto};

bool all_calls(const Arguments&) {
  return true;
}

// The backward calls that dlattn is to compute: by default short sequences in 16 bits, as for
// others torch's kernel was as fast or faster.
bool gradients_for_cpu(const Arguments& arguments) {
  const Whose whose = whose_gradients;
  if (whose != Whose::kAuto) return whose == Whose::kDlattn;
  const Tensor q = describe(arguments.tensor(kForCpuBackward.query), "q");
  const Tensor k = describe(arguments.tensor(kForCpuBackward.key), "k");
  if (q.ndim != 4 || k.ndim != 4) return false;
  return q.dtype.bits == 16 && q.shape[2] >= 32 && q.shape[2] <= 128 && k.shape[2] <= 128 &&
         q.shape[3] <= 128;
}

struct Replacement {
  const char* backend;
  const char* name;
  const Signature& signature;
  int num_results;
  bool (*is_ours)(const Arguments& arguments);
  void (*compute)(const Arguments& arguments, Results& results);
  void (*own)(const Arguments& arguments, Results& results);
};
constexpr Replacement kReplacements[] = {
    {"CPU", "_scaled_dot_product_flash_attention_for_cpu", kForCpu.signature, 2, all_calls,
     compute_for_cpu, own_for_cpu},
    {"CPU", "_scaled_dot_product_flash_attention_for_cpu_backward", kForCpuBackward.signature, 3,
     gradients_for_cpu, compute_for_cpu_backward, own_for_cpu_backward},
};
constexpr int kNumReplacements = std::size(kReplacements);
std::atomic<std::int64_t> served[kNumReplacements];

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
bool serve(int which, const Arguments& arguments, Results& results) {
  const Replacement& replacement = kReplacements[which];
  std::string reason;
  try {
    if (!replacement.is_ours(arguments)) return false;
    replacement.compute(arguments, results);
    served[which].fetch_add(1, std::memory_order_relaxed);
    return true;
  } catch (const UnsupportedError& error) {  // before anything was launched
    reason = error.what();
  } catch (const nb::builtin_exception& error) {
    reason = error.what();
  }
  count_refused(replacement.name, reason);
  return false;
}

thread_local bool in_torchs_own = false;

// A torch whose function calls the operator rather than the kernel would call this kernel again.
void hand_on(const Replacement& replacement, const Arguments& arguments, Results& results) {
  if (in_torchs_own) throw std::runtime_error("torch's own kernel is not reached");
  struct InTorchsOwn {
    InTorchsOwn() { in_torchs_own = true; }
    ~InTorchsOwn() { in_torchs_own = false; }
  } const inside;
  replacement.own(arguments, results);
}

template <int which>
void sdpa_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  run_or_throw([&] {
    constexpr const Replacement& kReplacement = kReplacements[which];
    const Arguments arguments(kReplacement.signature, stack);
    Results results;
    if (!serving || !serve(which, arguments, results)) hand_on(kReplacement, arguments, results);
    for (int i = 0; i < kReplacement.num_results; ++i)
      stack[i] = reinterpret_cast<Value>(results[i].release());
  });
}
constexpr torch_abi::Kernel* kSdpaKernels[] = {sdpa_kernel<0>, sdpa_kernel<1>};
static_assert(std::size(kSdpaKernels) == kNumReplacements);

auto& sdpa_libraries = *new std::vector<torch_abi::Library>;  // as those of torch_ops.cpp

const char* what_torch_lacks() {
  const torch_abi::Functions& torch = torch_functions;
  const bool has_all = torch.last_error && torch.is_defined && torch.new_handle && torch.copy &&
                       torch.call && torch.attention_for_cpu && torch.attention_for_cpu_backward;
  return has_all ? nullptr : "torch is older than 2.13";
}

std::string register_replacements(const std::string& folder, const std::string& backend,
                                  const nb::dict& schemas) {
  std::vector<int> wanted;
  for (int i = 0; i < kNumReplacements; ++i) {
    const Replacement& one = kReplacements[i];
    if (backend != one.backend || !schemas.contains(one.name)) continue;
    if (!same_arguments(one.signature, schemas[one.name]))
      return concat("the native ", one.name, " has other arguments");
    wanted.push_back(i);
  }
  if (wanted.size() != nb::len(schemas)) return "an operator has no native kernel";
  if (std::string why = load_torch(folder); !why.empty()) return why;
  if (const char* const why = what_torch_lacks()) return why;
  torch_abi::Library library = nullptr;
  if (torch_functions.new_library("aten", backend.c_str(), "torch_sdpa.cpp", 0, &library))
    return "torch made no library of kernels";
  for (const int i : wanted) {
    const Replacement& one = kReplacements[i];
    if (!torch_functions.add_kernel(library, one.name, kSdpaKernels[i], torch_abi::kVersion))
      continue;
    torch_functions.delete_library(library);
    return concat("torch did not take the native ", one.name);
  }
  sdpa_libraries.push_back(library);
  return {};
}

}  // namespace

nb::str register_torch_sdpa(nb::handle folder, nb::handle backend, const nb::dict& schemas,
                            nb::handle count_refused) {
  if (!count_refused_in_python) count_refused_in_python = count_refused.inc_ref().ptr();
  const std::string why = register_replacements(text(folder), text(backend), schemas);
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
  for (int i = 0; i < kNumReplacements; ++i) {
    const std::int64_t count = reset ? served[i].exchange(0) : served[i].load();
    if (count > 0) found[kReplacements[i].name] = count;
  }
  return found;
}

}  // namespace dlattn::python
