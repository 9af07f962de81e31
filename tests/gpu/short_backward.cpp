// Gradients by every kernel, in device memory of exactly the tensors' sizes and with a workspace of
// the plan's bytes, all of them NaN before.
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "backward_problem.h"
#include "check.h"
#include "device_copy.h"
#include "short_parts.h"

using namespace dlattn;
using test::Backward;
using test::Buffer;
using test::DeviceCopy;
using test::Layout;
using test::require;
using test::Spec;

namespace {

std::set<std::string> served;  // kernels that have run a problem

// The tensors of a call on the device.
class OnDevice {
 public:
  explicit OnDevice(const Backward& from) : params_(from.params) {
    const AttentionParams& p = from.params.forward;
    const test::Problem& problem = from.problem;
    AttentionParams& to = params_.forward;
    const std::int64_t batch = p.batch_size;
    to.device = {DeviceType::kCuda, 0};
    copy(problem.q, p.q.dtype, &to.q.data);
    copy(problem.k, p.k.dtype, &to.k.data);
    copy(problem.v, p.v.dtype, &to.v.data);
    copy(problem.out, p.out.dtype, &to.out.data);
    copy(problem.lse, DType::kFloat32, &to.lse.data);
    if (p.bias.data) copy(problem.bias, p.bias.dtype, &to.bias.data);
    if (p.alibi_slopes.data) copy(problem.alibi, DType::kFloat32, &to.alibi_slopes.data);
    if (p.sinks.data) copy(problem.sinks, DType::kFloat32, &to.sinks.data);
    if (p.mask.data)
      copy(p.mask.data, static_cast<std::int64_t>(problem.mask.size()), &to.mask.data);
    if (p.cu_seqlens_q) copy(p.cu_seqlens_q, (batch + 1) * 4, &to.cu_seqlens_q);
    if (p.cu_seqlens_k) copy(p.cu_seqlens_k, (batch + 1) * 4, &to.cu_seqlens_k);
    if (p.seqused_k) copy(p.seqused_k, batch * 4, &to.seqused_k);
    copy(from.dout, p.out.dtype, &params_.dout.data);
    copy(from.dlse, DType::kFloat32, &params_.dlse.data);
    result(from, test::kDq, p.q.dtype, &params_.dq.data);
    result(from, test::kDk, p.k.dtype, &params_.dk.data);
    result(from, test::kDv, p.v.dtype, &params_.dv.data);
    result(from, test::kDbias, p.bias.dtype, &params_.dbias.data);
    result(from, test::kDslopes, DType::kFloat32, &params_.dalibi_slopes.data);
    result(from, test::kDsinks, DType::kFloat32, &params_.dsinks.data);
  }

  BackwardParams& params() { return params_; }
  void copy_back(Backward* to) const {
    for (int n = 0; n < test::kGradients; ++n)
      if (results_[n]) results_[n]->copy_back(to->results[n].data());
  }

 private:
  template <typename Data>
  DeviceCopy* copy(const void* data, std::int64_t bytes, Data* to) {
    copies_.push_back(std::make_unique<DeviceCopy>(data, bytes));
    *to = static_cast<Data>(copies_.back()->data());
    return copies_.back().get();
  }
  template <typename Data>
  DeviceCopy* copy(const Buffer& from, DType dtype, Data* to) {
    return copy(from.data(), from.size() * size_of(dtype), to);
  }
  template <typename Data>
  void result(const Backward& from, test::Gradient which, DType dtype, Data* to) {
    if (from.results[which].size() > 0) results_[which] = copy(from.results[which], dtype, to);
  }

  BackwardParams params_;
  std::vector<std::unique_ptr<DeviceCopy>> copies_;
  const DeviceCopy* results_[test::kGradients] = {};
};

// `bias_dims` as for Backward.
void run(const Spec& spec, unsigned bias_dims = 0) {
  const Backward first(spec, bias_dims);
  const bool rounds = spec.dtype != DType::kFloat32;
  const test::ExactGradients exact = test::exact_gradients(first);
  const test::Gradients plain = test::plain_gradients(first, rounds);
  for (const std::string_view kernel : backward_kernel_names()) {
    if (kernel == "auto" || kernel == "cpu") continue;
    for (const bool deterministic : {false, true}) {
      Backward backward(spec, bias_dims);
      OnDevice device(backward);
      BackwardParams& params = device.params();
      params.deterministic = deterministic;
      Options options;
      options.kernel = kernel;
      AttentionParams& p = params.forward;
      if (!supported(params, device_info(p.device), options).ok) continue;
      served.insert(std::string(kernel));
      p.workspace_bytes = plan(params, device_info(p.device), options).workspace_bytes;
      if (p.workspace_bytes > 0) {
        require(cudaMalloc(&p.workspace, p.workspace_bytes));
        require(cudaMemset(p.workspace, 0xff, p.workspace_bytes));
      }
      dlattn::backward(params, nullptr, options);
      require(cudaDeviceSynchronize());
      cudaFree(p.workspace);
      device.copy_back(&backward);
      const std::string wrong = test::verdict(backward, exact, plain);
      CHECK_FOR(wrong.empty(),
                std::string(kernel) + (deterministic ? ", deterministic: " : ": ") + wrong);
    }
  }
}

Spec of(DType dtype, std::int64_t rows, std::int64_t keys, std::int64_t dim, Causal causal) {
  Spec spec;
  spec.dtype = dtype;
  spec.batch_size = 1;
  spec.seqlen_q = rows, spec.seqlen_k = keys;
  spec.num_heads = 2, spec.num_heads_kv = 1;
  spec.head_dim = spec.head_dim_v = dim;
  spec.causal = causal;
  return spec;
}

void run(DType dtype) {
  run(of(dtype, 64, 64, 64, Causal::kNone));
  run(of(dtype, 130, 100, 128, Causal::kBottomRight));  // rows that see nothing
  run(of(dtype, 33, 17, 256, Causal::kTopLeft));
  run(of(dtype, 5, 0, 64, Causal::kNone));
  for (const Layout layout : {Layout::kBhsd, Layout::kPadded, Layout::kBroadcast}) {
    Spec spec = of(dtype, 70, 130, 40, Causal::kBottomRight);
    spec.layout = layout, spec.head_dim_v = 72;
    spec.window_left = 20;
    run(spec);
  }
  for (const std::int64_t dim : {64, 128, 200}) {
    const Spec plain = of(dtype, 66, 131, dim, Causal::kBottomRight);
    Spec spec = plain;
    spec.alibi = spec.sinks = true;
    run(spec);
    spec = plain, spec.softcap = 5;
    run(spec);
    spec = plain, spec.mask = true;
    run(spec);
    spec.mask_broadcast = true;
    run(spec);
    for (const bool fp32 : {false, true}) {
      spec = plain, spec.bias = true, spec.bias_fp32 = fp32;
      run(spec);
      run(spec, 4 | 8);  // one dbias for all heads and batch entries
      run(spec, 2);      // and for all queries
      spec.alibi = spec.mask = true;
      run(spec);
    }
  }
  Spec varlen = of(dtype, 0, 0, 64, Causal::kBottomRight);
  varlen.batch_size = 5;
  varlen.lengths_q = {5, 0, 70, 1, 33}, varlen.lengths_k = {9, 4, 130, 0, 20};
  run(varlen);
  varlen.used_k = {9, 0, 100, 0, 7};
  varlen.alibi = varlen.sinks = true;
  run(varlen);
}

}  // namespace

void test::run_backward() {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) run(dtype);
  for (const char* const kernel : {"wmma", "scalar"})
    CHECK_FOR(served.count(kernel) == 1, std::string(kernel) + " has computed no gradients");
}
