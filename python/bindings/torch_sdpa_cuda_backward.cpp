#include <initializer_list>

#include "backward_tensors.h"
#include "dlattn/device.h"
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

// `packed`: that of sequences packed one after the other.
constexpr Signature flash_backward_signature(bool packed) {
  Signature made;
  add_all(&made, "Tensor",
          {"grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k"});
  add_all(&made, "int", {"max_q", "max_k"});
  add_all(&made, "float", {"dropout_p"});
  add_all(&made, "bool", {"is_causal"});
  if (packed) {
    add_all(&made, "Tensor", {"rng_state", "unused"});
  } else {
    add_all(&made, "Tensor", {"philox_seed", "philox_offset"});
  }
  add_all(&made, "Optional[float]", {"scale"});
  if (packed) add_all(&made, "Optional[int]", {"window_size_left", "window_size_right"});
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

constexpr SdpaOperator kFlashBackward(flash_backward_signature(false));
constexpr SdpaOperator kPackedFlashBackward(flash_backward_signature(true));
constexpr SdpaOperator kEfficientBackward(efficient_backward_signature());
constexpr SdpaOperator kCudnnBackward(cudnn_backward_signature());

// Throws unless torch's own kernel can be called by its function.
template <typename Function>
void check_reachable(Function* function, torch_abi::Tensor query) {
  if (!function || describe(query, "q").device.type != DeviceType::kCuda)
    unsupported("torch has no such kernel");
}

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

TorchKernel torchs_kernel(const SdpaOperator& op) {
  return &op == &kFlashBackward       ? TorchKernel::kFlash
         : &op == &kEfficientBackward ? TorchKernel::kEfficient
                                      : TorchKernel::kCudnn;
}

bool is_faster(const SdpaOperator& op, const BackwardParams& params, const Options& options) {
  const AttentionParams& p = params.forward;
  const Plan chosen = plan(params, device_info(p.device), options);
  GradientCall call;
  call.kernel = chosen.kernel;
  call.has_bias = p.bias.data != nullptr;
  call.wants_dbias = params.dbias.data != nullptr;
  call.deterministic = params.deterministic;
  call.seqlen_q = p.seqlen_q;
  call.head_dim = p.head_dim;
  return is_as_fast(call, torchs_kernel(op));
}

// Returns false where the call is left to torch.
bool run_backward(const SdpaOperator& op, const Arguments& arguments, bool if_faster,
                  Problem* problem, BackwardParams* params) {
  const Device device = problem->params.device;
  const OwnedTensor dout = read_dout(arguments.tensor(op.grad_out), *problem, params);
  params->deterministic = are_deterministic_algorithms_enabled();
  params->forward = problem->params;
  if (if_faster && !is_faster(op, *params, problem->options)) return false;
  TorchWorkspace workspace{device, {}};
  problem->options.workspace = workspace.allocator();
  backward(*params, stream_of(device), problem->options);
  return true;
}

bool compute_backward(const SdpaOperator& op, const Arguments& arguments, Causal causal,
                      bool if_faster, SdpaResults& results) {
  Problem problem;
  BackwardParams params;
  read_backward_call(op, arguments, causal, &problem);
  for (int i = 0; i < kBiasGradient; ++i)
    results[i].tensor = new_gradient(i, input_of(op, arguments, i), false, problem, &params);
  return run_backward(op, arguments, if_faster, &problem, &params);
}

bool compute_flash_backward(const Arguments& arguments, bool if_faster, SdpaResults& results) {
  return compute_backward(kFlashBackward, arguments, Causal::kBottomRight, if_faster, results);
}

bool compute_cudnn_backward(const Arguments& arguments, bool if_faster, SdpaResults& results) {
  for (const int i : {kCudnnBackward.cum_seq_q, kCudnnBackward.cum_seq_k}) {
    if (is_tensor(arguments, i)) unsupported("cum_seq_q or cum_seq_k is given");
  }
  // With a mask cuDNN has NaN where a row sees nothing, and where the mask is float32.
  if (is_tensor(arguments, kCudnnBackward.attn_mask)) if_faster = false;
  return compute_backward(kCudnnBackward, arguments, Causal::kTopLeft, if_faster, results);
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

bool compute_efficient_backward(const Arguments& arguments, bool if_faster, SdpaResults& results) {
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
    return run_backward(kOp, arguments, if_faster, &problem, &params);
  return true;
}

// torch's own kernels, for the calls that are not for dlattn.

void own_flash_backward(const Arguments& arguments, SdpaResults& results) {
  constexpr const SdpaOperator& kOp = kFlashBackward;
  const auto tensor = [&](const char* name) { return arguments.tensor(kOp.signature.index(name)); };
  check_reachable(torch_functions.flash_attention_backward, tensor("query"));
  double scale = arguments.number(kOp.scale);
  torch_abi::Tensor made[3] = {};
  const torch_abi::Error error = torch_functions.flash_attention_backward(
      tensor("grad_out"), tensor("query"), tensor("key"), tensor("value"), tensor("out"),
      tensor("logsumexp"), tensor("cum_seq_q"), tensor("cum_seq_k"),
      arguments.integer(kOp.signature.index("max_q")),
      arguments.integer(kOp.signature.index("max_k")), arguments.number(kOp.dropout_p),
      arguments.flag(kOp.is_causal), tensor("philox_seed"), tensor("philox_offset"),
      arguments.given(kOp.scale) ? &scale : nullptr, &made[0], &made[1], &made[2]);
  check_torch_error(error, "computing gradients");
  for (int i = 0; i < 3; ++i) results[i].tensor = OwnedTensor(made[i]);
}

void own_packed_flash_backward(const Arguments& arguments, SdpaResults& results) {
  constexpr const SdpaOperator& kOp = kPackedFlashBackward;
  constexpr int kLeft = kOp.signature.index("window_size_left");
  constexpr int kRight = kOp.signature.index("window_size_right");
  const auto tensor = [&](const char* name) { return arguments.tensor(kOp.signature.index(name)); };
  check_reachable(torch_functions.packed_flash_attention_backward, tensor("query"));
  double scale = arguments.number(kOp.scale);
  std::int64_t left = arguments.integer(kLeft), right = arguments.integer(kRight);
  torch_abi::Tensor made[3] = {};
  const torch_abi::Error error = torch_functions.packed_flash_attention_backward(
      tensor("grad_out"), tensor("query"), tensor("key"), tensor("value"), tensor("out"),
      tensor("logsumexp"), tensor("cum_seq_q"), tensor("cum_seq_k"),
      arguments.integer(kOp.signature.index("max_q")),
      arguments.integer(kOp.signature.index("max_k")), arguments.number(kOp.dropout_p),
      arguments.flag(kOp.is_causal), tensor("rng_state"), tensor("unused"),
      arguments.given(kOp.scale) ? &scale : nullptr, arguments.given(kLeft) ? &left : nullptr,
      arguments.given(kRight) ? &right : nullptr, &made[0], &made[1], &made[2]);
  check_torch_error(error, "computing gradients");
  for (int i = 0; i < 3; ++i) results[i].tensor = OwnedTensor(made[i]);
}

void own_efficient_backward(const Arguments& arguments, SdpaResults& results) {
  constexpr const SdpaOperator& kOp = kEfficientBackward;
  constexpr int kNumResults = 4;
  const auto tensor = [&](const char* name) { return arguments.tensor(kOp.signature.index(name)); };
  check_reachable(torch_functions.efficient_attention_backward, tensor("query"));
  double scale = arguments.number(kOp.scale);
  bool wanted[kNumResults];
  arguments.flags(kOp.grad_input_mask, wanted, kNumResults);
  std::int32_t mask[kNumResults];
  for (int i = 0; i < kNumResults; ++i) mask[i] = wanted[i];
  torch_abi::Tensor made[kNumResults] = {};
  const torch_abi::Error error = torch_functions.efficient_attention_backward(
      tensor("grad_out_"), tensor("query"), tensor("key"), tensor("value"), tensor("attn_bias"),
      tensor("out"), tensor("logsumexp"), tensor("philox_seed"), tensor("philox_offset"),
      arguments.number(kOp.dropout_p), mask, kNumResults, arguments.flag(kOp.is_causal),
      arguments.given(kOp.scale) ? &scale : nullptr, &made[0], &made[1], &made[2], &made[3]);
  check_torch_error(error, "computing gradients");
  for (int i = 0; i < kNumResults; ++i) results[i].tensor = OwnedTensor(made[i]);
}

void own_cudnn_backward(const Arguments& arguments, SdpaResults& results) {
  constexpr const SdpaOperator& kOp = kCudnnBackward;
  const auto tensor = [&](const char* name) { return arguments.tensor(kOp.signature.index(name)); };
  check_reachable(torch_functions.cudnn_attention_backward, tensor("query"));
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

// The least that is_as_fast() asks for, before a plan is made.
bool is_on_hopper(const SdpaOperator& op, const Arguments& arguments) {
  const Device device = describe(arguments.tensor(op.query), "q").device;
  return device.type == DeviceType::kCuda && device_info(device).compute_major == 9;
}
bool may_beat_flash(const Arguments& arguments) {
  return is_on_hopper(kFlashBackward, arguments);
}
bool may_beat_packed_flash(const Arguments& arguments) {
  return is_on_hopper(kPackedFlashBackward, arguments);
}
bool may_beat_efficient(const Arguments& arguments) {
  const Tensor q = describe(arguments.tensor(kEfficientBackward.query), "q");
  return q.device.type == DeviceType::kCuda && q.dtype.bits == 16;
}
bool may_beat_cudnn(const Arguments& arguments) {
  return is_tensor(arguments, kCudnnBackward.attn_mask) || is_on_hopper(kCudnnBackward, arguments);
}

}  // namespace

const SdpaKernel kSdpaFlashBackward = {"_scaled_dot_product_flash_attention_backward",
                                       "CUDA",
                                       kFlashBackward,
                                       3,
                                       may_beat_flash,
                                       compute_flash_backward,
                                       own_flash_backward};
const SdpaKernel kSdpaPackedFlashBackward = {
    "_flash_attention_backward", "CUDA",  kPackedFlashBackward,     3,
    may_beat_packed_flash,       nullptr, own_packed_flash_backward};
const SdpaKernel kSdpaEfficientBackward = {"_scaled_dot_product_efficient_attention_backward",
                                           "CUDA",
                                           kEfficientBackward,
                                           4,
                                           may_beat_efficient,
                                           compute_efficient_backward,
                                           own_efficient_backward};
const SdpaKernel kSdpaCudnnBackward = {"_scaled_dot_product_cudnn_attention_backward",
                                       "CUDA",
                                       kCudnnBackward,
                                       3,
                                       may_beat_cudnn,
                                       compute_cudnn_backward,
                                       own_cudnn_backward};

}  // namespace dlattn::python
