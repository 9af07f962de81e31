#include <algorithm>
#include <limits>

#include "errors.h"
#include "torch_kernel.h"
#include "torch_sdpa_kernels.h"

// The forward operators of CUDA. Nothing in them needs a GPU: tests run them on the CPU.
namespace dlattn::python {
namespace {

// The arguments of an operator; that of flash-attention has no bias.
constexpr Signature forward_signature(bool with_bias, bool with_debug_mask) {
  Signature made;
  for (const char* name : {"query", "key", "value"}) made.add("Tensor", name);
  if (with_bias) {
    made.add("Optional[Tensor]", "attn_bias");
    made.add("bool", "compute_log_sumexp");
  }
  made.add("float", "dropout_p");
  made.add("bool", "is_causal");
  if (with_debug_mask) made.add("bool", "return_debug_mask");
  made.add("Optional[float]", "scale");
  return made;
}
constexpr SdpaOperator kFlash(forward_signature(false, true));
constexpr SdpaOperator kEfficient(forward_signature(true, false));
constexpr SdpaOperator kCudnn(forward_signature(true, true));

// Rows of the log-sum-exp that memory-efficient attention's backward reads at a time.
constexpr std::int64_t kEfficientRows = 32;

constexpr dlpack::DLDataType kSeedType{dlpack::kInt, 64, 1};
constexpr dlpack::DLDataType kUnsignedSeedType{dlpack::kUInt, 64, 1};

OwnedTensor empty_vector(const char* name, std::int64_t size, dlpack::DLDataType dtype,
                         Device device) {
  const std::int64_t stride = 1;
  return empty_strided(name, &size, &stride, 1, dtype, device);
}

OwnedTensor empty_number(const char* name, dlpack::DLDataType dtype, Device device) {
  return empty_strided(name, nullptr, nullptr, 0, dtype, device);
}

void run_forward(Problem* problem) {
  TorchWorkspace workspace{problem->params.device, {}};
  problem->options.workspace = workspace.allocator();
  forward(problem->params, stream_of(problem->params.device), problem->options);
}

bool compute_flash(const Arguments& arguments, bool, SdpaResults& results) {
  Problem problem;
  AttentionParams& p = problem.params;
  check_dense(kFlash, arguments);
  read_forward(kFlash, arguments, Causal::kBottomRight, &problem);
  OwnedTensor& out = results[0].tensor;
  OwnedTensor& lse = results[1].tensor;
  out = empty_like("out", arguments.tensor(kFlash.query));
  set_out(describe(out.get(), "out", true), &problem);
  Tensor rows;
  lse = empty_tensor("lse", problem.lse.sizes, problem.lse.ndim, DType::kFloat32, p.device, &rows);
  set_lse(rows, &problem);
  run_forward(&problem);
  // The last row of a causal call sees the last key.
  const bool maybe_blind = p.causal == Causal::kNone ? p.seqlen_k == 0 : p.seqlen_q > p.seqlen_k;
  if (maybe_blind) make_infinities_positive(lse);
  for (const int i : {2, 3}) results[i].tensor = undefined_tensor();
  results[4].number = p.seqlen_q;
  results[5].number = p.seqlen_k;
  // Without dropout nobody reads seed and offset.
  results[6].tensor = empty_vector("rng_state", 2, kUnsignedSeedType, p.device);
  results[7].tensor = empty_number("unused", kUnsignedSeedType, p.device);
  results[8].tensor = empty_vector("debug_attn_mask", 0, to_dlpack(p.q.dtype), p.device);
  return true;
}

// The log-sum-exp of memory-efficient attention, whose rows are padded.
OwnedTensor new_padded_lse(bool wanted, Problem* problem) {
  const AttentionParams& p = problem->params;
  const std::int64_t rows = (p.seqlen_q + kEfficientRows - 1) / kEfficientRows * kEfficientRows;
  const std::int64_t sizes[3] = {p.batch_size, p.num_heads, wanted ? rows : 0};
  Tensor lse;
  OwnedTensor made = empty_tensor("lse", sizes, 3, DType::kFloat32, p.device, &lse);
  if (!wanted) return made;
  if (rows != p.seqlen_q) fill(made, std::numeric_limits<double>::infinity());
  lse.shape[2] = p.seqlen_q;
  set_lse(lse, problem);
  return made;
}

bool compute_efficient(const Arguments& arguments, bool, SdpaResults& results) {
  Problem problem;
  AttentionParams& p = problem.params;
  check_dense(kEfficient, arguments);
  const bool has_bias = is_tensor(arguments, kEfficient.attn_mask);
  const bool wants_lse = arguments.flag(kEfficient.compute_log_sumexp);
  // Torch does not ask for the log-sum-exp where the bias alone requires grad, and its backward
  // then fails. Its C ABI does not tell what requires grad.
  if (has_bias && !wants_lse && torch_functions.is_grad_enabled())
    unsupported("attn_bias may require grad");
  read_forward(kEfficient, arguments, Causal::kTopLeft, &problem);
  OwnedTensor& out = results[0].tensor;
  OwnedTensor& lse = results[1].tensor;
  const int rows_first[4] = {0, 2, 1, 3};
  out = empty_tensor("out", problem.out.sizes, rows_first, 4, p.q.dtype, p.device);
  set_out(describe(out.get(), "out", true), &problem);
  lse = new_padded_lse(wants_lse, &problem);
  run_forward(&problem);
  if (wants_lse && (has_bias || p.seqlen_k == 0)) make_infinities_positive(lse);
  // Seed and offset, which nobody reads, are on the GPU only where a graph is captured: there every
  // result is to be.
  const bool captured = p.device.type == DeviceType::kCuda && is_capturing(stream_of(p.device));
  for (const int i : {2, 3})
    results[i].tensor = empty_number("philox_seed", kSeedType, captured ? p.device : Device{});
  return true;
}

// A tensor of query's sizes but for its columns, its dimensions in memory as query's are.
OwnedTensor new_out_as_query(torch_abi::Tensor query, const Problem& problem) {
  const Tensor q = describe(query, "q");
  if (problem.out.sizes[3] == q.shape[3]) return empty_like("out", query);
  int order[4] = {0, 1, 2, 3};
  std::stable_sort(order, order + 4, [&](int a, int b) { return q.strides[a] > q.strides[b]; });
  return empty_tensor("out", problem.out.sizes, order, 4, problem.params.q.dtype, q.device);
}

bool compute_cudnn(const Arguments& arguments, bool, SdpaResults& results) {
  Problem problem;
  AttentionParams& p = problem.params;
  check_dense(kCudnn, arguments);
  read_forward(kCudnn, arguments, Causal::kTopLeft, &problem);
  OwnedTensor& out = results[0].tensor;
  OwnedTensor& lse = results[1].tensor;
  out = new_out_as_query(arguments.tensor(kCudnn.query), problem);
  set_out(describe(out.get(), "out", true), &problem);
  const std::int64_t sizes[4] = {p.batch_size, p.num_heads, p.seqlen_q, 1};
  Tensor rows;
  lse = empty_tensor("lse", sizes, 4, DType::kFloat32, p.device, &rows);
  rows.ndim = 3;
  set_lse(rows, &problem);
  run_forward(&problem);
  const bool maybe_blind = is_tensor(arguments, kCudnn.attn_mask) || p.seqlen_k == 0;
  if (maybe_blind) make_infinities_positive(lse);
  for (const int i : {2, 3, 8}) results[i].tensor = undefined_tensor();
  results[4].number = p.seqlen_q;
  results[5].number = p.seqlen_k;
  for (const int i : {6, 7}) results[i].tensor = empty_number("philox_seed", kSeedType, p.device);
  return true;
}

}  // namespace

const SdpaKernel kSdpaFlash = {
    "_scaled_dot_product_flash_attention", "CUDA", kFlash, 9, nullptr, compute_flash, nullptr};
const SdpaKernel kSdpaEfficient = {"_scaled_dot_product_efficient_attention",
                                   "CUDA",
                                   kEfficient,
                                   4,
                                   nullptr,
                                   compute_efficient,
                                   nullptr};
const SdpaKernel kSdpaCudnn = {
    "_scaled_dot_product_cudnn_attention", "CUDA", kCudnn, 9, nullptr, compute_cudnn, nullptr};

}  // namespace dlattn::python
