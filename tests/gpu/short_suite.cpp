// Every CUDA kernel on small problems, in device memory of exactly the tensors' sizes, so that
// compute-sanitizer sees any access beyond them. Prints 'N passed, N failed'; exit code 77 where
// there is no GPU.
#include <cmath>
#include <memory>
#include <set>
#include <string>

#include "check.h"
#include "device_copy.h"
#include "problem.h"
#include "short_parts.h"

using namespace dlattn;
using test::Buffer;
using test::DeviceCopy;
using test::Layout;
using test::require;
using test::Spec;

namespace {

std::set<std::string> served;  // kernels that have run a problem

std::int64_t bytes_of(const Buffer& buffer, DType dtype) {
  return buffer.size() * size_of(dtype);
}

// Rounding the probabilities and the output to `dtype` moves an output by up to half a unit of max
// |v| + |out|; a plain computation does both. Twice that, and twice what fp32 arithmetic costs it,
// is accepted.
double accepted(const test::Problem& problem, const test::Reference& reference) {
  double largest = 0;
  for (std::int64_t i = 0; i < problem.v.size(); ++i) {
    const double x = std::abs(problem.v.get(i));
    if (x > largest) largest = x;
  }
  const double unit = problem.params.q.dtype == DType::kFloat16    ? 0x1p-10
                      : problem.params.q.dtype == DType::kBFloat16 ? 0x1p-7
                                                                   : 0x1p-23;
  return 2 * reference.plain_error + 2 * unit * largest;
}

void run(const Spec& spec, std::string_view kernel) {
  test::Problem problem(spec);
  const test::Reference reference(problem);
  const DType dtype = spec.dtype;
  AttentionParams params = problem.params;
  const std::int64_t batch = params.batch_size;
  const DeviceCopy q(problem.q.data(), bytes_of(problem.q, dtype));
  const DeviceCopy k(problem.k.data(), bytes_of(problem.k, dtype));
  const DeviceCopy v(problem.v.data(), bytes_of(problem.v, dtype));
  const DeviceCopy out(problem.out.data(), bytes_of(problem.out, dtype));
  const DeviceCopy lse(params.lse.data, bytes_of(problem.lse, DType::kFloat32));
  const DeviceCopy bias(params.bias.data, bytes_of(problem.bias, params.bias.dtype));
  const DeviceCopy alibi(params.alibi_slopes.data, bytes_of(problem.alibi, DType::kFloat32));
  const DeviceCopy sinks(params.sinks.data, bytes_of(problem.sinks, DType::kFloat32));
  const DeviceCopy mask(params.mask.data, static_cast<std::int64_t>(problem.mask.size()));
  const DeviceCopy cu_q(params.cu_seqlens_q, (batch + 1) * 4);
  const DeviceCopy cu_k(params.cu_seqlens_k, (batch + 1) * 4);
  const DeviceCopy used_k(params.seqused_k, batch * 4);
  params.device = {DeviceType::kCuda, 0};
  params.q.data = q.data();
  params.k.data = k.data();
  params.v.data = v.data();
  params.out.data = out.data();
  params.lse.data = static_cast<float*>(lse.data());
  params.bias.data = bias.data();
  params.mask.data = static_cast<const std::uint8_t*>(mask.data());
  params.alibi_slopes.data = static_cast<const float*>(alibi.data());
  params.sinks.data = static_cast<const float*>(sinks.data());
  params.cu_seqlens_q = static_cast<const std::int32_t*>(cu_q.data());
  params.cu_seqlens_k = static_cast<const std::int32_t*>(cu_k.data());
  params.seqused_k = static_cast<const std::int32_t*>(used_k.data());

  Options options;
  options.kernel = kernel;
  if (kernel != "scalar" && !supported(params, device_info(params.device), options).ok) return;
  served.insert(std::string(kernel));
  forward(params, nullptr, options);
  require(cudaDeviceSynchronize());
  out.copy_back(problem.out.data());
  lse.copy_back(problem.lse.data());

  const test::Errors errors = test::errors_of(problem, reference);
  const std::string what = spec.describe() + " with " + std::string(kernel);
  CHECK_FOR(errors.out <= accepted(problem, reference),
            what + ": out is off by " + std::to_string(errors.out));
  CHECK_FOR(errors.lse <= 2 * reference.plain_lse_error + 0x1p-16,
            what + ": lse is off by " + std::to_string(errors.lse));
  CHECK_FOR(problem.out.stray_writes() == 0, what + ": wrote between rows of out");
}

// Features of every family; those of the scalar kernel alone come after.
std::vector<Spec> plain_specs(DType dtype) {
  std::vector<Spec> specs;
  const auto add = [&](std::int64_t rows, std::int64_t keys, std::int64_t dim, Causal causal,
                       Layout layout) {
    Spec spec;
    spec.dtype = dtype;
    spec.batch_size = 1;
    spec.seqlen_q = rows;
    spec.seqlen_k = keys;
    spec.num_heads = 2;
    spec.num_heads_kv = 1;
    spec.head_dim = spec.head_dim_v = dim;
    spec.causal = causal;
    spec.layout = layout;
    specs.push_back(spec);
  };
  add(64, 64, 64, Causal::kNone, Layout::kBshd);
  add(65, 100, 64, Causal::kBottomRight, Layout::kBshd);
  add(33, 17, 32, Causal::kBottomRight, Layout::kPadded);
  add(70, 130, 128, Causal::kTopLeft, Layout::kBhsd);
  add(17, 1, 96, Causal::kNone, Layout::kBroadcast);
  add(5, 0, 64, Causal::kNone, Layout::kBshd);
  Spec window = specs[1];
  window.window_left = 20;
  specs.push_back(window);
  return specs;
}

std::vector<Spec> scalar_specs(DType dtype) {
  std::vector<Spec> specs;
  Spec spec;
  spec.dtype = dtype;
  spec.head_dim = 40;
  spec.head_dim_v = 72;
  spec.softcap = 5;
  spec.alibi = spec.sinks = true;
  spec.bias = spec.bias_broadcast = true;
  spec.mask = true;
  specs.push_back(spec);
  Spec varlen;
  varlen.dtype = dtype;
  varlen.lengths_q = {5, 0, 40};
  varlen.lengths_k = {33, 7, 40};
  varlen.batch_size = 3;
  varlen.causal = Causal::kBottomRight;
  specs.push_back(varlen);
  Spec wide;
  wide.dtype = dtype;
  wide.batch_size = 1;
  wide.head_dim = 256;
  wide.head_dim_v = 200;
  specs.push_back(wide);
  return specs;
}

// Head dims that one family has.
std::vector<Spec> large_specs(DType dtype) {
  std::vector<Spec> specs = scalar_specs(dtype);
  for (Spec& spec : specs) spec.head_dim += 256;
  specs.back().head_dim_v = 300;
  return specs;
}

void merge(DType dtype) {
  constexpr std::int64_t kRows = 9, kHeads = 3, kDim = 40;
  std::mt19937 random(5);
  Buffer parts[2] = {{dtype, kRows * kHeads * kDim}, {dtype, kRows * kHeads * kDim}};
  Buffer lses[2] = {{DType::kFloat32, kRows * kHeads}, {DType::kFloat32, kRows * kHeads}};
  Buffer out(dtype, kRows * kHeads * kDim), lse(DType::kFloat32, kRows * kHeads);
  MergeParams params;
  params.num_states = 2;
  params.out.dtype = params.outs[0].dtype = params.outs[1].dtype = dtype;
  params.device = {DeviceType::kCuda, 0};
  params.batch_size = 1;
  params.seqlen_q = kRows;
  params.num_heads = kHeads;
  params.head_dim_v = kDim;
  params.out.row_stride = kHeads * kDim;
  params.out.head_stride = kDim;
  params.lse.head_stride = kRows;
  std::vector<std::unique_ptr<DeviceCopy>> copies;
  const auto to_device = [&](const Buffer& buffer, DType type) {
    copies.push_back(std::make_unique<DeviceCopy>(buffer.data(), bytes_of(buffer, type)));
    return copies.back()->data();
  };
  for (int n = 0; n < 2; ++n) {
    parts[n].fill_normal(random, 0.5, 1.0);
    lses[n].fill_normal(random, 1.0, 1.0);
    params.outs[n].data = to_device(parts[n], dtype);
    params.lses[n].data = static_cast<const float*>(to_device(lses[n], DType::kFloat32));
    params.outs[n].row_stride = kHeads * kDim;
    params.outs[n].head_stride = kDim;
    params.lses[n].head_stride = kRows;
    params.lses[n].row_stride = 1;
  }
  params.out.data = to_device(out, dtype);
  const DeviceCopy& out_copy = *copies.back();
  params.lse.data = static_cast<float*>(to_device(lse, DType::kFloat32));
  const DeviceCopy& lse_copy = *copies.back();
  merge_states(params);
  require(cudaDeviceSynchronize());
  out_copy.copy_back(out.data());
  lse_copy.copy_back(lse.data());
  const double unit = dtype == DType::kFloat32   ? 0x1p-21
                      : dtype == DType::kFloat16 ? 0x1p-10
                                                 : 0x1p-7;
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t h = 0; h < kHeads; ++h) {
      const double a = lses[0].get(h * kRows + i), b = lses[1].get(h * kRows + i);
      const double total = std::log(std::exp(a) + std::exp(b));
      CHECK(std::abs(lse.get(h * kRows + i) - total) <= 0x1p-20 * (1 + std::abs(total)));
      for (std::int64_t d = 0; d < kDim; ++d) {
        const std::int64_t at = (i * kHeads + h) * kDim + d;
        const double expected =
            std::exp(a - total) * parts[0].get(at) + std::exp(b - total) * parts[1].get(at);
        CHECK(std::abs(out.get(at) - expected) <= unit * (1 + std::abs(expected)));
      }
    }
  }
}

}  // namespace

int main() {
  if (device_count() == 0) {
    std::printf("skipped: %s\n", device_status().c_str());
    return 77;
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const std::string_view kernel : kernel_names()) {
      if (kernel == "auto" || kernel == "cpu") continue;
      if (kernel != "scalar" && dtype == DType::kFloat32) continue;
      for (const Spec& spec : plain_specs(dtype)) run(spec, kernel);
    }
    for (const Spec& spec : scalar_specs(dtype)) run(spec, "scalar");
    if (dtype != DType::kFloat32) {
      for (const Spec& spec : large_specs(dtype)) run(spec, "wmma_halves");
    }
    merge(dtype);
  }
  for (const char* const kernel :
       {"scalar", "wmma_qk", "wmma_smem", "wmma_halves", "wmma", "decode"})
    CHECK_FOR(served.count(kernel) == 1, std::string(kernel) + " has served nothing");
  test::run_decode();
  test::run_append();
  test::run_backward();
  return test::summary();
}
