// Whose gradients torch's operators get where nobody asked: the plans of made-up GPUs, compared
// with torch's kernels by python/bindings/torch_sdpa_choice.h.
#include <string>

#include "check.h"
#include "plan_problems.h"
#include "torch_sdpa_choice.h"

using namespace dlattn;
using namespace dlattn::python;
using namespace test;

namespace {

struct Call {
  std::int64_t head_dim = 128;
  std::int64_t seqlen = 4096;
  DType dtype = DType::kBFloat16;
  bool causal = false;
  bool bias = false;
  bool dbias = false;
  bool deterministic = false;
};

template <typename View>
void lay_out(View* view, int index, const Call& call, std::int64_t heads) {
  view->data = memory + index * kApart;
  view->dtype = call.dtype;
  view->row_stride = call.head_dim;  // bhsd, as torch's
  view->head_stride = call.seqlen * call.head_dim;
  view->batch_stride = heads * view->head_stride;
}

BackwardParams problem_of(const Call& call) {
  constexpr std::int64_t kHeads = 16;
  BackwardParams b;
  AttentionParams& p = b.forward;
  p.device = {DeviceType::kCuda, 0};
  p.batch_size = 2, p.num_heads = p.num_heads_kv = kHeads;
  p.seqlen_q = p.seqlen_k = call.seqlen, p.head_dim = p.head_dim_v = call.head_dim;
  p.softmax_scale = 0.1;
  p.causal = call.causal ? Causal::kTopLeft : Causal::kNone;
  lay_out(&p.q, 0, call, kHeads), lay_out(&p.k, 1, call, kHeads), lay_out(&p.v, 2, call, kHeads);
  lay_out(&p.out, 3, call, kHeads), lay_out(&b.dout, 4, call, kHeads);
  lay_out(&b.dq, 5, call, kHeads), lay_out(&b.dk, 6, call, kHeads), lay_out(&b.dv, 7, call, kHeads);
  p.lse.data = reinterpret_cast<float*>(memory + 8 * kApart);
  p.lse.row_stride = 1, p.lse.head_stride = call.seqlen;
  p.lse.batch_stride = kHeads * call.seqlen;
  if (call.bias) {
    p.bias.data = memory + 9 * kApart, p.bias.dtype = call.dtype;
    p.bias.row_stride = call.seqlen, p.bias.head_stride = call.seqlen * call.seqlen;
  }
  if (call.dbias) {
    b.dbias.data = memory + 10 * kApart, b.dbias.dtype = call.dtype;
    b.dbias.row_stride = call.seqlen, b.dbias.head_stride = call.seqlen * call.seqlen;
  }
  b.deterministic = call.deterministic;
  return b;
}

bool is_ours(const DeviceInfo& device, TorchKernel torchs, const Call& call) {
  const BackwardParams b = problem_of(call);
  const Plan chosen = plan(b, device);
  const bool has_bias = call.bias, wants_dbias = call.dbias;
  return is_as_fast(
      {chosen.kernel, has_bias, wants_dbias, call.deterministic, call.seqlen, call.head_dim},
      torchs);
}

Call with(void (*change)(Call*)) {
  Call call;
  change(&call);
  return call;
}

void on_hopper() {
  const DeviceInfo h200 = gpus().back();
  for (const std::int64_t head_dim : {40, 64, 96, 128, 192, 256}) {
    for (const std::int64_t seqlen : {128, 300, 1024, 4096}) {
      for (const bool causal : {false, true}) {
        for (const bool deterministic : {false, true}) {
          Call call{head_dim, seqlen};
          call.causal = causal, call.deterministic = deterministic;
          const std::string what = describe(plan(problem_of(call), h200));
          CHECK_FOR(is_ours(h200, TorchKernel::kFlash, call), what);
          CHECK_FOR(is_ours(h200, TorchKernel::kEfficient, call), what);
          const bool short_or_narrow = head_dim <= 64 || seqlen <= 512;
          CHECK_FOR(is_ours(h200, TorchKernel::kCudnn, call) == (short_or_narrow && !deterministic),
                    what);
        }
      }
    }
  }
  const auto efficient = [&](void (*change)(Call*)) {
    return is_ours(h200, TorchKernel::kEfficient, with(change));
  };
  CHECK(efficient([](Call* c) { c->bias = true; }));
  CHECK(efficient([](Call* c) { c->bias = c->dbias = true; }));
  CHECK(efficient([](Call* c) { c->bias = true, c->head_dim = 256; }));
  CHECK(efficient([](Call* c) { c->bias = c->dbias = true, c->head_dim = 256; }));
  CHECK(efficient([](Call* c) { c->bias = c->deterministic = true; }));
  CHECK(!efficient([](Call* c) { c->dtype = DType::kFloat32; }));
}

void elsewhere() {
  const std::vector<DeviceInfo> others = gpus();
  for (std::size_t i = 0; i + 1 < others.size(); ++i) {
    const DeviceInfo& device = others[i];
    for (const std::int64_t head_dim : {64, 128, 256}) {
      Call call{head_dim};
      CHECK_FOR(!is_ours(device, TorchKernel::kFlash, call), device.name);
      CHECK_FOR(!is_ours(device, TorchKernel::kCudnn, call), device.name);
      CHECK_FOR(is_ours(device, TorchKernel::kEfficient, call), device.name);
      call.bias = true;
      CHECK_FOR(is_ours(device, TorchKernel::kEfficient, call), device.name);
      call.dbias = true;
      CHECK_FOR(!is_ours(device, TorchKernel::kEfficient, call), device.name);
    }
  }
}

}  // namespace

int main() {
  on_hopper();
  elsewhere();
  return test::summary();
}
