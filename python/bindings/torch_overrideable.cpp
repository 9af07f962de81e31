#include "torch_overrideable.h"

#include <string>
#include <vector>

#include "backward_tensors.h"
#include "errors.h"
#include "torch_kernel.h"
#include "torch_sdpa_kernels.h"

// The kernels of aten::_scaled_dot_product_fused_attention_overrideable and its backward operator.
// dlattn/integrations/torch/overrideable.py calls them, and says which calls they carry.
namespace dlattn::python {
namespace overrideable {  // other files have these names too, and some builds join files
namespace {

using torch_abi::Value;

constexpr Signature forward_signature() {
  Signature made;
  for (const char* name : {"query", "key", "value"}) made.add("Tensor", name);
  made.add("Optional[Tensor]", "attn_bias");
  made.add("float", "dropout_p");
  for (const char* name : {"is_causal", "return_debug_mask"}) made.add("bool", name);
  made.add("Optional[float]", "scale");
  return made;
}

constexpr Signature backward_signature() {
  Signature made;
  for (const char* name : {"grad_out", "query", "key", "value", "attn_bias"})
    made.add("Tensor", name);
  made.add("List[bool]", "grad_input_mask");
  for (const char* name : {"out", "logsumexp", "cum_seq_q", "cum_seq_k"}) made.add("Tensor", name);
  for (const char* name : {"max_q", "max_k"}) made.add("int", name);
  made.add("float", "dropout_p");
  made.add("bool", "is_causal");
  for (const char* name : {"philox_seed", "philox_offset"}) made.add("Tensor", name);
  made.add("Optional[float]", "scale");
  return made;
}

constexpr SdpaOperator kForward(forward_signature());
constexpr SdpaOperator kBackward(backward_signature());
constexpr int kNumForwardResults = kMaxSdpaResults;
constexpr int kNumBackwardResults = 4;

// Settings for which the operators have no argument, in the place of dropout_p: -1 - bits, a whole
// number. overrideable.py writes it. Others than dlattn have a probability there.
struct Settings {
  std::uint64_t bits = 0;

  explicit Settings(double dropout_p) {
    constexpr double kMost = std::int64_t{1} << 52;
    if (!(dropout_p <= -1.0 && dropout_p >= -kMost)) unsupported("the call is not dlattn's");
    bits = static_cast<std::uint64_t>(-1.0 - dropout_p);
  }

  Causal causal() const { return static_cast<Causal>(bits & 3); }
  Layout layout() const { return bits & 1 << 2 ? Layout::kBhsd : Layout::kBshd; }
  bool deterministic() const { return bits & 1 << 3; }
  bool has_mask() const { return bits & 1 << 4; }  // and no bias, in attn_bias
  bool batch_invariant() const { return bits & 1 << 5; }
  std::int64_t window_left() const { return window(6); }
  std::int64_t window_right() const { return window(6 + kWindowBits); }

 private:
  static constexpr int kWindowBits = 23;
  std::int64_t window(int shift) const {
    return static_cast<std::int64_t>(bits >> shift & ((1 << kWindowBits) - 1)) - 1;
  }
};

// Takes in the tensors of the forward call and its settings; out and lse are left. Returns the
// tensors.
std::vector<Tensor> read_call(const SdpaOperator& op, const Arguments& arguments,
                              const Settings& settings, Problem* problem) {
  AttentionParams& p = problem->params;
  std::vector<Tensor> tensors;
  tensors.reserve(kNumBackwardResults);
  const auto take = [&](int i, const char* name) {
    tensors.push_back(describe(arguments.tensor(i), name));
    check_device(name, tensors.back().device, tensors.front().device, "q");
  };
  take(op.query, "q"), take(op.key, "k"), take(op.value, "v");
  if (is_tensor(arguments, op.attn_mask)) take(op.attn_mask, settings.has_mask() ? "mask" : "bias");
  p.device = tensors.front().device;
  p.causal = settings.causal();
  p.window_left = settings.window_left();
  p.window_right = settings.window_right();
  problem->layout = settings.layout();
  problem->return_lse = true;
  read_tensors(tensors, problem);
  p.softmax_scale = arguments.given(op.scale) ? arguments.number(op.scale) : default_scale(p);
  return tensors;
}

void run_forward(const Arguments& arguments, SdpaResults& results) {
  Problem problem;
  const AttentionParams& p = problem.params;
  const Settings settings(arguments.number(kForward.dropout_p));
  read_call(kForward, arguments, settings, &problem);
  problem.options.batch_invariant = settings.batch_invariant();  // the backward pass has no such
  OwnedTensor& out = results[0].tensor;
  OwnedTensor& lse = results[1].tensor;
  Tensor made;
  out = empty_tensor("out", problem.out.sizes, problem.out.ndim, p.out.dtype, p.device, &made);
  set_out(made, &problem);
  lse = empty_tensor("lse", problem.lse.sizes, problem.lse.ndim, DType::kFloat32, p.device, &made);
  set_lse(made, &problem);
  TorchWorkspace workspace{p.device, {}};
  problem.options.workspace = workspace.allocator();
  forward(p, stream_of(p.device), problem.options);
  for (const int i : {2, 3, 6, 7, 8}) results[i].tensor = undefined_tensor();
}

void run_backward(const Arguments& arguments, SdpaResults& results) {
  constexpr const SdpaOperator& kOp = kBackward;
  const Settings settings(arguments.number(kOp.dropout_p));
  Problem problem;
  BackwardParams params;
  const std::vector<Tensor> inputs = read_call(kOp, arguments, settings, &problem);
  const Device device = problem.params.device;
  set_out(describe(arguments.tensor(kOp.out), "out"), &problem);
  const Tensor lse = describe(arguments.tensor(kOp.logsumexp), "lse");
  check_dtype(lse, kFloat32);
  set_lse(lse, &problem);
  const OwnedTensor dout = read_dout(arguments.tensor(kOp.grad_out), problem, &params);
  bool wanted[kNumBackwardResults];
  arguments.flags(kOp.grad_input_mask, wanted, kNumBackwardResults);
  Tensor made;
  for (int i = 0; i < kNumBackwardResults; ++i) {
    if (!wanted[i]) {
      const std::int64_t nothing = 0;  // nobody reads it; the first result must be a tensor
      results[i].tensor = i == 0 ? empty_tensor("dq", &nothing, 1, DType::kFloat32, device, &made)
                                 : undefined_tensor();
      continue;
    }
    const Tensor& input = inputs.at(static_cast<std::size_t>(i));
    results[i].tensor = empty_tensor(kGradients[i], input.shape, input.ndim,
                                     gradient_dtype(i, input), device, &made);
    set_gradient(i, made, input, problem, &params);
  }
  params.deterministic = settings.deterministic() || are_deterministic_algorithms_enabled();
  params.forward = problem.params;
  TorchWorkspace workspace{device, {}};
  problem.options.workspace = workspace.allocator();
  backward(params, stream_of(device), problem.options);
}

// Returns false where the arguments stay on the stack: the kernel in Python meets the reason too,
// and raises it as an exception of its own class, or finds memory that was not to be had.
template <typename Run>
bool run_or_leave(const SdpaOperator& op, int num_results, Value* stack, Run run) noexcept {
  Arguments arguments(op.signature, stack);
  try {
    SdpaResults results;
    run(arguments, results);
    put_on(stack, num_results, results);
    return true;
  } catch (...) {
  }
  arguments.give_back();
  return false;
}

constexpr char kForwardName[] = "_scaled_dot_product_fused_attention_overrideable";
constexpr char kBackwardName[] = "_scaled_dot_product_fused_attention_overrideable_backward";
constexpr char kGradientsName[] = "_overrideable_gradients";  // in torch.ops.dlattn

void forward_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  if (!run_or_leave(kForward, kNumForwardResults, stack, run_forward))
    call_python(kForwardName, kNumForwardResults, stack);
}

// Takes the arguments of a backward call whose dout is zero, as is that of a node without a
// gradient, and gives results without gradients. Returns false for others.
bool give_nothing(Value* stack) {
  bool has_dout = false;
  const auto dout = reinterpret_cast<torch_abi::Tensor>(stack[kBackward.grad_out]);
  check_torch_error(torch_functions.is_defined(dout, &has_dout), "reading a tensor");
  if (has_dout) return false;
  SdpaResults results;
  for (int i = 0; i < kNumBackwardResults; ++i) results[i].tensor = undefined_tensor();
  {
    const Arguments arguments(kBackward.signature, stack);
  }
  put_on(stack, kNumBackwardResults, results);
  return true;
}

// Torch's backward operator, for autograd's keys: there it would give results to whose gradients
// it has an error of its own. With gradients on, they may be asked for, and Python has dlattn's.
void backward_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  bool is_nothing = false;
  run_or_throw([&] { is_nothing = give_nothing(stack); });
  if (is_nothing) return;
  const bool differentiably = torch_functions.is_grad_enabled();
  call_python(differentiably ? kBackwardName : kGradientsName, kNumBackwardResults, stack);
}

// dlattn's operator below it, whose first result is undefined where Python's kernel has raised
// something: backward_kernel raises it.
void gradients_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  if (run_or_leave(kBackward, kNumBackwardResults, stack, run_backward)) return;
  const std::string name = concat("dlattn::", kBackwardName);
  run_or_throw([&] {
    check_torch_error(torch_functions.call(name.c_str(), "", stack, torch_abi::kVersion),
                      "calling a kernel in Python");
  });
}

struct Kernel {
  const char* operators;
  const char* name;
  const char* key_prefix;
  const SdpaOperator& op;
  torch_abi::Kernel* kernel;
};
constexpr Kernel kKernels[] = {
    {"dlattn", kGradientsName, "", kBackward, gradients_kernel},
    {"aten", kBackwardName, "Autograd", kBackward, backward_kernel},
    {"aten", kForwardName, "", kForward, forward_kernel},
};

auto& libraries = *new std::vector<torch_abi::Library>;  // as those of torch_ops.cpp

std::string register_kernels(const std::string& folder, const std::string& key,
                             const nb::dict& schemas) {
  if (std::string why = load_torch(folder); !why.empty()) return why;
  if (const char* const why = what_torch_lacks(key)) return why;
  for (const Kernel& kernel : kKernels) {
    if (!same_arguments(kernel.op.signature, schemas[kernel.name]))
      return concat("the native ", kernel.name, " has other arguments");
  }
  for (const Kernel& kernel : kKernels) {
    std::string why = add_torch_kernel(kernel.operators, kernel.key_prefix + key, kernel.name,
                                       kernel.kernel, &libraries);
    if (!why.empty()) return why;
  }
  return {};
}

}  // namespace
}  // namespace overrideable

nb::str register_torch_overrideable(nb::handle folder, nb::handle key, const nb::dict& schemas) {
  const std::string why = overrideable::register_kernels(text(folder), text(key), schemas);
  return nb::str(why.data(), why.size());
}

}  // namespace dlattn::python
