#include <limits>
#include <memory>

#include "dlattn/backward.h"
#include "errors.h"
#include "problem.h"
#include "torch_sdpa_kernels.h"

namespace dlattn::python {
namespace {

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

// The forward call, its tensors taken in; out and lse are left.
void read_call_for_cpu(const SdpaOperator& op, const Arguments& arguments, Problem* problem) {
  if (arguments.number(op.dropout_p) != 0.0) unsupported("dropout_p is not 0");
  if (same(describe(arguments.tensor(op.query), "q").dtype, to_dlpack(DType::kFloat64)))
    unsupported("query is float64");
  if (is_tensor(arguments, op.attn_mask)) {
    const Tensor mask = describe(arguments.tensor(op.attn_mask), "bias");
    if (mask.dtype.code == dlpack::kBool || (mask.ndim != 2 && mask.ndim != 4))
      unsupported("attn_mask is bool, or has not 2 or 4 dimensions");
  }
  read_forward(op, arguments, Causal::kTopLeft, problem);
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

bool compute_for_cpu(const Arguments& arguments, bool, SdpaResults& results) {
  Problem problem;
  AttentionParams& p = problem.params;
  read_call_for_cpu(kForCpu, arguments, &problem);
  results[0].tensor = empty_like("out", arguments.tensor(kForCpu.query));
  set_out(describe(results[0].tensor.get(), "out", true), &problem);
  const std::unique_ptr<float[]> lse(new float[p.batch_size * p.num_heads * p.seqlen_q]);
  p.lse.data = lse.get();
  p.lse.batch_stride = p.num_heads * p.seqlen_q;
  p.lse.head_stride = p.seqlen_q;
  problem.options.num_threads = cpu_threads_of_torch();
  forward(p, nullptr, problem.options);
  results[1].tensor = log_sum_exp_by_row(lse.get(), p);
  return true;
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

bool compute_for_cpu_backward(const Arguments& arguments, bool, SdpaResults& results) {
  constexpr const SdpaOperator& kOp = kForCpuBackward;
  Problem problem;
  BackwardParams params;
  read_call_for_cpu(kOp, arguments, &problem);
  const std::unique_ptr<float[]> lse = read_results(kOp, arguments, &problem);
  const OwnedTensor dout = read_dout(arguments.tensor(kOp.grad_out), problem, &params);
  const int inputs[3] = {kOp.query, kOp.key, kOp.value};
  for (int i = 0; i < 3; ++i)
    results[i].tensor = new_gradient(i, arguments.tensor(inputs[i]), true, problem, &params);
  params.forward = problem.params;
  problem.options.num_threads = cpu_threads_of_torch();
  backward(params, nullptr, problem.options);
  return true;
}

// torch's own kernels. Their errors are torch's in torch's words.

struct OptionalArguments {
  torch_abi::Tensor mask;
  double scale;
  torch_abi::Tensor* mask_given;
  double* scale_given;

  OptionalArguments(const SdpaOperator& op, const Arguments& arguments)
      : mask(arguments.tensor(op.attn_mask)),
        scale(arguments.number(op.scale)),
        mask_given(is_tensor(arguments, op.attn_mask) ? &mask : nullptr),
        scale_given(arguments.given(op.scale) ? &scale : nullptr) {}
};

void own_for_cpu(const Arguments& arguments, SdpaResults& results) {
  constexpr const SdpaOperator& kOp = kForCpu;
  OptionalArguments optional(kOp, arguments);
  torch_abi::Tensor made[2] = {};
  const torch_abi::Error error = torch_functions.attention_for_cpu(
      arguments.tensor(kOp.query), arguments.tensor(kOp.key), arguments.tensor(kOp.value),
      arguments.number(kOp.dropout_p), arguments.flag(kOp.is_causal), optional.mask_given,
      optional.scale_given, &made[0], &made[1]);
  check_own_error(error);
  for (int i = 0; i < 2; ++i) results[i].tensor = OwnedTensor(made[i]);
}

void own_for_cpu_backward(const Arguments& arguments, SdpaResults& results) {
  constexpr const SdpaOperator& kOp = kForCpuBackward;
  OptionalArguments optional(kOp, arguments);
  torch_abi::Tensor made[3] = {};
  const torch_abi::Error error = torch_functions.attention_for_cpu_backward(
      arguments.tensor(kOp.grad_out), arguments.tensor(kOp.query), arguments.tensor(kOp.key),
      arguments.tensor(kOp.value), arguments.tensor(kOp.out), arguments.tensor(kOp.logsumexp),
      arguments.number(kOp.dropout_p), arguments.flag(kOp.is_causal), optional.mask_given,
      optional.scale_given, &made[0], &made[1], &made[2]);
  check_own_error(error);
  for (int i = 0; i < 3; ++i) results[i].tensor = OwnedTensor(made[i]);
}

// Short sequences in 16 bits and causal ones in float32 that are not short: for others torch's
// kernel was as fast or faster.
bool is_faster_for_cpu(const Arguments& arguments) {
  const Tensor q = describe(arguments.tensor(kForCpuBackward.query), "q");
  const Tensor k = describe(arguments.tensor(kForCpuBackward.key), "k");
  if (q.ndim != 4 || k.ndim != 4) return false;
  const std::int64_t rows = q.shape[2], keys = k.shape[2], columns = q.shape[3];
  if (q.dtype.bits == 16) return rows >= 32 && rows <= 128 && keys <= 128 && columns <= 128;
  return q.dtype.bits == 32 && arguments.flag(kForCpuBackward.is_causal) && rows >= 128 &&
         keys >= 128 && columns <= 256;
}

}  // namespace

const SdpaKernel kSdpaForCpu = {"_scaled_dot_product_flash_attention_for_cpu",
                                "CPU",
                                kForCpu,
                                2,
                                nullptr,
                                compute_for_cpu,
                                own_for_cpu};
const SdpaKernel kSdpaForCpuBackward = {"_scaled_dot_product_flash_attention_for_cpu_backward",
                                        "CPU",
                                        kForCpuBackward,
                                        3,
                                        is_faster_for_cpu,
                                        compute_for_cpu_backward,
                                        own_for_cpu_backward};

}  // namespace dlattn::python
