#include "backward_case.h"
#include "core/plan/choose.h"
#include "cuda/backward/scalar/bias.cuh"
#include "cuda/backward/scalar/kernel.cuh"
#include "cuda/delta/row_blocks/kernel.cuh"
#include "cuda/reduce/partial_sums/kernel.cuh"
#include "feature_cases.h"
#include "length_cases.h"

// The launches of backward passes by scalar, with those that all families share: delta and reduce.
namespace {

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;
using simt::Wanted;
namespace scalar = dlattn::backward_scalar;

template <typename T>
void run_launch(const dlattn::BackwardParams& p, const dlattn::Plan& plan,
                const dlattn::Launch& launch) {
  if (launch.operation == dlattn::Operation::kDelta)
    return dlattn::delta::row_blocks::delta_kernel<T>(
        p, dlattn::delta::row_blocks::make_shape(p, plan));
  if (launch.operation == dlattn::Operation::kReduce) {
    return dlattn::reduce::partial_sums::reduce_kernel<float>(
        p, dlattn::reduce::partial_sums::make_shape(p, plan.parts_per_head));
  }
  const scalar::Shape shape = scalar::make_shape(p, plan, launch.variant);
  const bool is_small = launch.head_dim_tile == 128;
  if (launch.variant == scalar::kBias) {
    scalar::bias_kernel<scalar::kNumThreads>(p, shape);
  } else if (launch.variant == scalar::kKeys) {
    is_small ? scalar::keys_kernel<128>(p, shape) : scalar::keys_kernel<256>(p, shape);
  } else {
    is_small ? scalar::queries_kernel<128>(p, shape) : scalar::queries_kernel<256>(p, shape);
  }
}

template <typename T>
class Run {
 public:
  Run(const Case& c, const Wanted& w)
      : case_(c), wanted_(w), tensors_(simt::make_backward_tensors<T>(c, w)) {
    params_ = simt::make_backward_params(c, w, tensors_);
    dlattn::Options options;
    options.kernel = "scalar";
    std::vector<std::string> reasons;
    if (!dlattn::core::fastest_plan(params_, simt::ada(), options, &plan_, &reasons))
      simt::die("no plan: %s", reasons.empty() ? "" : reasons[0].c_str());
    const std::int64_t size = plan_.workspace_bytes / 4;
    tensors_.workspace.allocate({1, 1, 1, size}, {size, size, size, 1});
    params_.forward.workspace = tensors_.workspace.data();
    params_.forward.workspace_bytes = plan_.workspace_bytes;
  }

  // Returns whether all is right.
  bool operator()(const std::string& name) {
    std::string trouble;
    std::vector<unsigned char> first;
    for (const simt::Schedule schedule : simt::schedules()) {
      for_each_result([](auto& tensor, int) { tensor.poison(); });
      tensors_.workspace.poison();
      launch_all(schedule);
      std::vector<unsigned char> bytes;
      for_each_result([&](auto& tensor, int) {
        if (!tensor.gaps_intact()) trouble = "a write outside a gradient";
        const std::vector<unsigned char> own = tensor.bytes();
        bytes.insert(bytes.end(), own.begin(), own.end());
      });
      if (first.empty()) first = bytes;
      if (bytes != first) trouble = "gradients depend on the order of threads";
    }
    return report(name, trouble);
  }

 private:
  template <typename Visit>
  void for_each_result(Visit visit) {
    visit(tensors_.dq, simt::kDq), visit(tensors_.dk, simt::kDk), visit(tensors_.dv, simt::kDv);
    visit(tensors_.dbias, simt::kDbias), visit(tensors_.dbias_float32, simt::kDbias);
    visit(tensors_.dslopes, simt::kDslopes), visit(tensors_.dsinks, simt::kDsinks);
  }

  void launch_all(simt::Schedule schedule) {
    for (int i = 0; i < plan_.num_launches(); ++i) {
      const dlattn::Launch& launch = plan_.launch(i);
      simt::Launch threads{dim3(static_cast<unsigned>(launch.grid)), dim3(launch.num_warps * 32),
                           static_cast<std::size_t>(launch.smem_bytes), schedule};
      simt::start_early(&threads, tensors_);
      simt::launch(threads, [&] { run_launch<T>(params_, plan_, launch); });
    }
  }

  bool report(const std::string& name, const std::string& trouble) {
    bool ok = trouble.empty();
    std::string text;
    if (!case_.sequences_overlap()) {
      const auto round = [](float x) { return static_cast<float>(static_cast<T>(x)); };
      const auto exact =
          simt::gradients<double>(case_, wanted_, tensors_, [](double x) { return x; });
      const auto plain = simt::gradients<float>(case_, wanted_, tensors_, round);
      for_each_result([&](auto& tensor, int which) {
        if (!tensor.data()) return;
        const simt::GradientError error =
            simt::compare_gradient(tensor, exact.of[which], plain.of[which]);
        ok = ok && error.ok();
        char line[80];
        std::snprintf(line, sizeof line, " %s%s %.1e (plain %.1e)", error.ok() ? "" : "WRONG ",
                      simt::kGradientNames[which], error.ours, error.plain);
        text += line;
      });
    }
    std::printf("%s %s:%s %s\n", ok ? "ok  " : "FAIL", name.c_str(), text.c_str(), trouble.c_str());
    std::fflush(stdout);
    return ok;
  }

  const Case& case_;
  const Wanted& wanted_;
  simt::BackwardTensors<T> tensors_;
  dlattn::BackwardParams params_;
  dlattn::Plan plan_;
};

struct BackwardCase {
  Case sizes;
  Wanted wanted = {};
};

// Every shape that dbias may have, and every gradient alone.
std::vector<BackwardCase> wanted_cases() {
  std::vector<BackwardCase> cases;
  const Case base = simt::with({70, 66, 40, kCausal, 2, 1, Layout::kBshd, 0, 2}, [](Case& c) {
    c.bias = simt::Bias::kFloat32, c.alibi = true, c.sinks = true, c.softcap = 3.0;
  });
  for (unsigned bits = 0; bits < 16; ++bits) {
    Wanted w;
    for (int i = 0; i < 4; ++i) w.per[i] = bits >> i & 1;
    w.dq = w.dk = w.dv = w.dslopes = w.dsinks = bits == 15;
    w.shared_slopes = true;
    Case c = base;
    if (bits % 3 == 1) c.bias = simt::Bias::kOwnDType;
    cases.push_back({c, w});
  }
  for (int alone = 0; alone < 5; ++alone) {
    Wanted w;
    w.dbias = false;
    w.dq = alone == 0, w.dk = alone == 1, w.dv = alone == 2;
    w.dslopes = alone == 3, w.dsinks = alone == 4;
    cases.push_back({base, w});
  }
  Wanted without;
  without.dout = false;
  cases.push_back({base, without});
  without.dout = true, without.dlse = false;
  cases.push_back({base, without});
  for (const double scale : {1e-4, 1e3}) {
    Wanted w;
    w.dout_scale = scale;
    cases.push_back({base, w});
  }
  return cases;
}

std::vector<BackwardCase> cases() {
  std::vector<Case> sizes = {
      {1, 1, 1, kFull, 3},
      {65, 129, 64, kFull},
      {130, 66, 33, kCausal},
      {63, 127, 72, kTopLeft, 2, 2, Layout::kPacked, 24, 2},
      {10, 70, 200, kCausal, 4, 2, Layout::kBhsd, 256, 2},
      {40, 20, 24, kCausal},  // rows that see nothing
      {20, 0, 64, kCausal},
      {0, 20, 64, kFull},
      {20, 20, 64, kFull, 1, 1, Layout::kBshd, 0, 0},
      {10, 40, 33, kCausal, 2, 1, Layout::kAlign2},
      {10, 40, 32, kTopLeft, 2, 1, Layout::kBroadcast, 0, 2},
  };
  simt::append(&sizes, simt::feature_cases(40));
  sizes.push_back(simt::with({20, 50, 40, kCausal, 2, 1, Layout::kBshd, 0, 2}, [](Case& c) {
    c.mask = true, c.softcap = 1.5, c.sinks = true, c.bias = simt::Bias::kOwnDType;
  }));
  simt::append(&sizes, simt::slice_cases(simt::with({1, 1, 24, kCausal, 2, 1}, [](Case& c) {
    c.alibi = true, c.bias = simt::Bias::kFloat32, c.mask = true, c.softcap = 5.0;
  })));
  simt::append(&sizes, simt::hostile_length_cases({1, 1, 24, kCausal, 2, 1}));
  std::vector<BackwardCase> cases = wanted_cases();
  for (const Case& c : sizes) cases.push_back({c});
  if (!simt::kThreadSanitizer) return cases;
  std::vector<BackwardCase> few;  // races are races with any numbers
  for (std::size_t i = 0; i < cases.size(); i += 4) few.push_back(cases[i]);
  return few;
}

template <typename T>
bool run(const BackwardCase& c, const char* filter) {
  if (c.sizes.layout == Layout::kAlign2 && sizeof(T) == 4) return true;
  const std::string name = std::string("backward scalar ") +
                           dlattn::to_string(simt::DTypeOf<T>::value) + " " + c.sizes.name() +
                           c.wanted.name();
  if (name.find(filter) == std::string::npos) return true;
  const simt::HangGuard guard(name);
  return Run<T>(c.sizes, c.wanted)(name);
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  int number = 0, failed = 0;
  for (const BackwardCase& c : cases()) {
    // Kernels are the same for all dtypes but where they read and write.
    const int dtype = number++ % 3;
    const bool ok = dtype == 0   ? run<float>(c, arguments.filter())
                    : dtype == 1 ? run<half>(c, arguments.filter())
                                 : run<__nv_bfloat16>(c, arguments.filter());
    failed += !ok;
    if (!ok && std::getenv("SIMT_STOP_AT_FAILURE")) std::_Exit(1);
  }
  std::printf("%d failed\n", failed);
  return failed != 0;
}
