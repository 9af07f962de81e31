#include <initializer_list>

#include "backward_tensors.h"
#include "errors.h"
#include "torch_kernel.h"
#include "torch_sdpa_kernels.h"

// The backward operators of CUDA. Nothing in them needs a GPU: tests run_backward them on the CPU.
namespace dlattn::python {
namespace {

constexpr void add_all(Signature* made, const char* type,
                       std::initializer_list<const char*> names) {
  for (const char* name : names) made->add(type, name);
}

constexpr Signature flash_backward_signature() {
  Signature made;
  add_all(&made, "Tensor",
          {"grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k"});
  add_all(&made, "int", {"max_q", "max_k"});
  add_all(&made, "float", {"dropout_p"});
  add_all(&made, "bool", {"is_causal"});
  add_all(&made, "Tensor", {"philox_seed", "philox_offset"});
  add_all(&made, "Optional[float]", {"scale"});
  return made;
}

constexpr Signature efficient_backward_signature() {
  Signature made;
  add_all(&made, "Tensor",
          {"grad_out_", "query", "key", "value", "attn_bias", "out", "logsumexp", "philox_seed",
           "philox_offset"});
  add_all(&made, "float", {"dropout_p"});
  add_all(&made, "List[bool]", {"grad_input_mask"});
  add_all(&made, "bool", {"is_causal"});
  add_all(&made, "Optional[float]", {"scale"});
  return made;
}

constexpr Signature cudnn_backward_signature() {
  Signature made;
  add_all(&made, "Tensor",
          {"grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset",
           "attn_bias", "cum_seq_q", "cum_seq_k"});
  add_all(&made, "int", {"max_q", "max_k"});
  add_all(&made, "float", {"dropout_p"});
  add_all(&made, "bool", {"is_causal"});
  add_all(&made, "Optional[float]", {"scale"});
  return made;
}

constexpr SdpaOperator kFlashBackward(flash_backward_signature());
constexpr SdpaOperator kEfficientBackward(efficient_backward_signature());
constexpr SdpaOperator kCudnnBackward(cudnn_backward_signature());

constexpr int kBiasGradient = 3;  // its place in kGradients
// Elements to which torch pads the rows of a bias' gradient.
constexpr std::int64_t kBiasColumns = 16;

torch_abi::Tensor input_of(const SdpaOperator& op, const Arguments& arguments, int i) {
  const int places[4] = {op.query, op.key, op.value, op.attn_mask};
  return arguments.tensor(places[i]);
}

// Takes in the forward call and its results. The log-sum-exp may have padded rows, or a dimension
// of one element behind them.
void read_backward_call(const SdpaOperator& op, const Arguments& arguments, Causal causal,
                        Problem* problem) {
  const AttentionParams& p = problem->params;
  check_dense(op, arguments);
  read_forward(op, arguments, causal, problem);
  const Tensor out = describe(arguments.tensor(op.out), "out");
  check_device("out", out.device, p.device, "q");
  set_out(out, problem);
  Tensor lse = describe(arguments.tensor(op.logsumexp), "lse");
  check_device("lse", lse.device, p.device, "q");
  check_dtype(lse, kFloat32);
  if (lse.ndim == 4 && lse.shape[3] == 1) lse.ndim = 3;
  if (&op == &kEfficientBackward && lse.ndim == 3 && lse.shape[2] > p.seqlen_q)
    lse.shape[2] = p.seqlen_q;
  set_lse(lse, problem);
}

void run_backward(const SdpaOperator& op, const Arguments& arguments, Problem* problem,
                  BackwardParams* params) {
  const Device device = problem->params.device;
  const OwnedTensor dout = read_dout(arguments.tensor(op.grad_out), *problem, params);
  params->deterministic = are_deterministic_algorithms_enabled();
  params->forward = problem->params;
  TorchWorkspace workspace{device, {}};
  problem->options.workspace = workspace.allocator();
  backward(*params, stream_of(device), problem->options);
}

void compute_backward(const SdpaOperator& op, const Arguments& arguments, Causal causal,
                      SdpaResults& results) {
  Problem problem;
  BackwardParams params;
  read_backward_call(op, arguments, causal, &problem);
  for (int i = 0; i < kBiasGradient; ++i)
    results[i].tensor = new_gradient(i, input_of(op, arguments, i), false, problem, &params);
  run_backward(op, arguments, &problem, &params);
}

void compute_flash_backward(const Arguments& arguments, SdpaResults& results) {
  compute_backward(kFlashBackward, arguments, Causal::kBottomRight, results);
}

void compute_cudnn_backward(const Arguments& arguments, SdpaResults& results) {
  for (const int i : {kCudnnBackward.cum_seq_q, kCudnnBackward.cum_seq_k}) {
    if (is_tensor(arguments, i)) unsupported("cum_seq_q or cum_seq_k is given");
  }
  compute_backward(kCudnnBackward, arguments, Causal::kTopLeft, results);
}

OwnedTensor new_bias_gradient(torch_abi::Tensor bias, const Problem& problem,
                              BackwardParams* params) {
  const Tensor described = describe(bias, "bias");
  std::int64_t strides[kMaxDims];
  std::int64_t stride = 1;
  for (int i = described.ndim - 1; i >= 0; --i) {
    strides[i] = stride;
    const std::int64_t size = described.shape[i];
    stride *=
        i == described.ndim - 1 ? (size + kBiasColumns - 1) / kBiasColumns * kBiasColumns : size;
  }
  OwnedTensor made = empty_strided("dbias", described.shape, strides, described.ndim,
                                   described.dtype, described.device);
  set_gradient(kBiasGradient, describe(made.get(), "dbias", true), described, problem, params);
  return made;
}

void compute_efficient_backward(const Arguments& arguments, SdpaResults& results) {
  constexpr const SdpaOperator& kOp = kEfficientBackward;
  Problem problem;
  BackwardParams params;
  read_backward_call(kOp, arguments, Causal::kTopLeft, &problem);
  bool wanted[kBiasGradient + 1];
  arguments.flags(kOp.grad_input_mask, wanted, kBiasGradient + 1);
  wanted[kBiasGradient] = wanted[kBiasGradient] && is_tensor(arguments, kOp.attn_mask);
  for (int i = 0; i < kBiasGradient; ++i) {
    BackwardParams unused;
    results[i].tensor =
        new_gradient(i, input_of(kOp, arguments, i), true, problem, wanted[i] ? &params : &unused);
    if (!wanted[i]) fill(results[i].tensor, 0.0);  // nobody reads it
  }
  results[kBiasGradient].tensor =
      wanted[kBiasGradient]
          ? new_bias_gradient(input_of(kOp, arguments, kBiasGradient), problem, &params)
          : undefined_tensor();
  if (wanted[0] || wanted[1] || wanted[2] || wanted[kBiasGradient])
    run_backward(kOp, arguments, &problem, &params);
}

// torch's own kernel of cuDNN, which computes gradients without a mask unless something else is
// asked for.
void own_cudnn_backward(const Arguments& arguments, SdpaResults& results) {
  constexpr const SdpaOperator& kOp = kCudnnBackward;
  const auto tensor = [&](const char* name) { return arguments.tensor(kOp.signature.index(name)); };
  if (!torch_functions.cudnn_attention_backward ||
      describe(tensor("query"), "q").device.type != DeviceType::kCuda)
    unsupported("torch has no such kernel");
  double scale = arguments.number(kOp.scale);
  torch_abi::Tensor made[3] = {};
  const torch_abi::Error error = torch_functions.cudnn_attention_backward(
      tensor("grad_out"), tensor("query"), tensor("key"), tensor("value"), tensor("out"),
      tensor("logsumexp"), tensor("philox_seed"), tensor("philox_offset"), tensor("attn_bias"),
      tensor("cum_seq_q"), tensor("cum_seq_k"), arguments.integer(kOp.signature.index("max_q")),
      arguments.integer(kOp.signature.index("max_k")), arguments.number(kOp.dropout_p),
      arguments.flag(kOp.is_causal), arguments.given(kOp.scale) ? &scale : nullptr, &made[0],
      &made[1], &made[2]);
  check_torch_error(error, "computing gradients");
  for (int i = 0; i < 3; ++i) results[i].tensor = OwnedTensor(made[i]);
}

// The calls that dlattn gets unless something else is asked for: those of cuDNN's operator with a
// mask, for which cuDNN has NaN where a row sees nothing, and where the mask is float32.
bool prefers_none(const Arguments&) {
  return false;
}
bool prefers_masks(const Arguments& arguments) {
  return is_tensor(arguments, kCudnnBackward.attn_mask);
}

}  // namespace

const SdpaKernel kSdpaFlashBackward = {"_scaled_dot_product_flash_attention_backward",
                                       "CUDA",
                                       kFlashBackward,
                                       3,
                                       prefers_none,
                                       compute_flash_backward,
                                       nullptr};
const SdpaKernel kSdpaEfficientBackward = {"_scaled_dot_product_efficient_attention_backward",
                                           "CUDA",
                                           kEfficientBackward,
                                           4,
                                           prefers_none,
                                           compute_efficient_backward,
                                           nullptr};
const SdpaKernel kSdpaCudnnBackward = {"_scaled_dot_product_cudnn_attention_backward",
                                       "CUDA",
                                       kCudnnBackward,
                                       3,
                                       prefers_masks,
                                       compute_cudnn_backward,
                                       own_cudnn_backward};

}  // namespace dlattn::python
