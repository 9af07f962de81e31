#include "backward_case.h"
#include "core/plan/choose.h"
#include "cuda/backward/wmma/bias.cuh"
#include "cuda/backward/wmma/convert.cuh"
#include "cuda/backward/wmma/keys.cuh"
#include "cuda/backward/wmma/queries.cuh"
#include "cuda/backward/wmma/shape.h"
#include "cuda/delta/row_blocks/kernel.cuh"
#include "cuda/reduce/partial_sums/kernel.cuh"
#include "feature_cases.h"
#include "length_cases.h"

// The launches of backward passes by wmma.
namespace {

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;
using simt::Wanted;
namespace backward = dlattn::backward_wmma;

template <typename T, int kTile>
void run_launch(const dlattn::BackwardParams& p, const dlattn::Plan& plan,
                const dlattn::Launch& launch) {
  if (launch.operation == dlattn::Operation::kDelta)
    return dlattn::delta::row_blocks::delta_kernel<T>(
        p, dlattn::delta::row_blocks::make_shape(p, plan));
  if (launch.operation == dlattn::Operation::kReduce) {
    return dlattn::reduce::partial_sums::reduce_kernel<float>(
        p, dlattn::reduce::partial_sums::make_shape(p, plan.parts_per_head));
  }
  const auto kernel = static_cast<backward::Kernel>(launch.variant);
  const backward::Shape shape = backward::planned_shape(p, plan, kernel, kTile);
  switch (kernel) {
    case backward::kKeys:
      return backward::keys_kernel<T, kTile>(p, shape);
    case backward::kLarge:
      if constexpr (kTile > 64) return backward::large_kernel<T, kTile>(p, shape);
      return;
    case backward::kQueries:
      return backward::queries_kernel<T, kTile>(p, shape);
    case backward::kConvert:
      return backward::convert_kernel<T, kTile>(p, shape);
    case backward::kBias:
      return backward::bias_kernel<T, kTile>(p, shape);
  }
}

template <typename T, int kTile>
class Run {
 public:
  Run(const Case& c, const Wanted& w, bool deterministic, const dlattn::DeviceInfo& device)
      : case_(c), wanted_(w), tensors_(simt::make_backward_tensors<T>(c, w)) {
    params_ = simt::make_backward_params(c, w, tensors_);
    params_.deterministic = deterministic;
    dlattn::Options options;
    options.kernel = "wmma";
    std::vector<std::string> reasons;
    if (!dlattn::core::fastest_plan(params_, device, options, &plan_, &reasons))
      simt::die("no plan: %s", reasons.empty() ? "" : reasons[0].c_str());
    if (plan_.head_dim_tile != kTile) simt::die("head_dim_tile is %d", plan_.head_dim_tile);
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
      for_each_result([&](auto& tensor, int which) {
        if (!tensor.gaps_intact()) trouble = "a write outside a gradient";
        if (which == simt::kDq && plan_.cleared_bytes > 0) return;
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
      simt::launch(threads, [&] { run_launch<T, kTile>(params_, plan_, launch); });
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

// Whether a tile has every case. The others have the same code for scores and other shapes of
// products: edges of tiles, what copies and walks depend on, and a few of the features.
bool has_every_case(int head_dim) {
  return head_dim == 64 && !simt::kThreadSanitizer;
}

// Every shape that dbias may have, and every gradient alone.
std::vector<BackwardCase> wanted_cases(int head_dim) {
  std::vector<BackwardCase> cases;
  const Case base = simt::with({67, 70, head_dim, kCausal, 2, 1, Layout::kBshd, 0, 2}, [](Case& c) {
    c.bias = simt::Bias::kFloat32, c.alibi = true, c.sinks = true;
  });
  for (unsigned bits = 0; bits < 16; ++bits) {
    if (!has_every_case(head_dim) && bits % 5 != 0) continue;
    Wanted w;
    for (int i = 0; i < 4; ++i) w.per[i] = bits >> i & 1;
    w.dq = w.dk = w.dv = w.dslopes = w.dsinks = bits == 15;
    Case c = base;
    if (bits % 3 == 1) c.bias = simt::Bias::kOwnDType;
    cases.push_back({c, w});
  }
  for (int alone = 0; alone < (has_every_case(head_dim) ? 5 : 2); ++alone) {
    Wanted w;
    w.dbias = false;
    w.dq = alone == 0, w.dk = alone == 1, w.dv = alone == 2;
    w.dslopes = alone == 3, w.dsinks = alone == 4;
    cases.push_back({base, w});
  }
  if (!has_every_case(head_dim)) return cases;
  Wanted without;
  without.dout = false;
  cases.push_back({base, without});
  without.dout = true, without.dlse = false;
  cases.push_back({base, without});
  Wanted large;
  large.dout_scale = 1e3;
  cases.push_back({base, large});
  return cases;
}

// Edges of tiles, features by themselves and together, rows that see nothing, grouped heads.
std::vector<BackwardCase> cases(int head_dim) {
  std::vector<Case> sizes = {
      {1, 3, head_dim, kFull},
      {65, 129, head_dim, kFull},
      {130, 66, head_dim, kCausal},
      {63, 127, head_dim - 8, kTopLeft, 2, 2, Layout::kPacked, head_dim - 16, 2},
      {33, 70, head_dim, kCausal, 4, 2, Layout::kBhsd, 16, 2},
      {40, 0, head_dim, kFull},
      {0, 40, head_dim, kFull},
      {20, 20, head_dim, kFull, 1, 1, Layout::kBshd, 0, 0},
  };
  const std::vector<Case> features = simt::feature_cases(head_dim);
  for (std::size_t i = 0; i < features.size(); ++i) {
    if (has_every_case(head_dim) || i % 3 == 1) sizes.push_back(features[i]);
  }
  const Case base = {35, 150, head_dim, kCausal, 2, 1, Layout::kBroadcast, 0, 2};
  const auto with = [&](auto set) { sizes.push_back(simt::with(base, set)); };
  with([](Case& c) { c.softcap = 2.0; });
  with([](Case& c) { c.alibi = true; });
  // Rows all of whose keys have the lowest number, whose multiple by log2(e) is none.
  with([](Case& c) {
    c.bias = simt::Bias::kFloat32;
    c.extreme = simt::Extreme{simt::Extreme::Where::kOddRows, 0, -3.4028235e38};
  });
  // Rows and tiles that a bias hides, beside sinks that are none and that leave nothing of a row.
  for (const double sink : {-INFINITY, INFINITY}) {
    with([=](Case& c) {
      c.bias = simt::Bias::kFloat32, c.sinks = true;
      c.extreme = simt::Extreme{simt::Extreme::Where::kOddRows, 0, -INFINITY};
      c.extreme->sink = sink;
    });
  }
  with([](Case& c) { c.bias = simt::Bias::kOwnDType, c.mask = true; });
  with([](Case& c) {
    c.bias = simt::Bias::kFloat32, c.score_layout = simt::ScoreLayout::kColumns, c.causal = kFull;
  });
  sizes.push_back(simt::with(simt::varlen(base, {9, 70, 0, 33}, {133, 90, 20, 0}), [](Case& c) {
    c.softcap = 2.0, c.bias = simt::Bias::kFloat32, c.mask = true, c.sinks = true;
    c.window_left = 45, c.layout = Layout::kBshd;
  }));
  const std::vector<Case> slices =
      simt::slice_cases(simt::with({1, 1, head_dim, kCausal, 2, 1}, [](Case& c) {
        c.alibi = true, c.bias = simt::Bias::kFloat32, c.mask = true;
      }));
  if (has_every_case(head_dim)) {
    simt::append(&sizes, slices);
    simt::append(&sizes, simt::hostile_length_cases({1, 1, head_dim, kCausal, 2, 1}));
  } else {
    sizes.push_back(slices[0]), sizes.push_back(slices[2]);
  }
  std::vector<BackwardCase> cases = wanted_cases(head_dim);
  for (const Case& c : sizes) cases.push_back({c});
  return cases;
}

// Whether a case is run so: each in one of the two ways, under AddressSanitizer in the other one,
// and in both of them in all orders.
bool runs([[maybe_unused]] int number, [[maybe_unused]] bool deterministic) {
#if defined(SIMT_ALL_ORDERS)
  return true;
#elif defined(SIMT_ASAN)
  return deterministic == (number % 2 != 0);
#else
  return deterministic == (number % 2 == 0);
#endif
}

template <typename T, int kTile>
void run(const simt::Arguments& arguments, int* failed) {
  if constexpr (simt::is_built(simt::DTypeOf<T>::value, kTile)) {
    int number = 0;
    for (const BackwardCase& c : cases(kTile)) {
      ++number;
      for (const bool deterministic : {false, true}) {
        if (!runs(number, deterministic)) continue;
        // Blocks that add to the same rows race there.
        if (c.sizes.sequences_overlap() && simt::kThreadSanitizer) continue;
        const std::string name = std::string("backward wmma ") +
                                 dlattn::to_string(simt::DTypeOf<T>::value) + " " + c.sizes.name() +
                                 c.wanted.name() + (deterministic ? " deterministic" : "");
        if (name.find(arguments.filter()) == std::string::npos) continue;
        const simt::HangGuard guard(name);
        // Two cases in turns by the kernel for larger shared memory, and by the one for 99 KB.
        const dlattn::DeviceInfo device = number % 4 < 2 ? simt::ada() : simt::hopper();
        if (Run<T, kTile>(c.sizes, c.wanted, deterministic, device)(name)) continue;
        ++*failed;
        if (std::getenv("SIMT_STOP_AT_FAILURE")) std::_Exit(1);
      }
    }
  }
}

template <int kTile>
void run_dtypes(const simt::Arguments& arguments, int* failed) {
  run<half, kTile>(arguments, failed);
  run<__nv_bfloat16, kTile>(arguments, failed);
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  int failed = 0;
  run_dtypes<64>(arguments, &failed);
  run_dtypes<128>(arguments, &failed);
  run_dtypes<256>(arguments, &failed);
  std::printf("%d failed\n", failed);
  return failed != 0;
}
