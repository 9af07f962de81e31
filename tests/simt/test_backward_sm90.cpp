#include "backward_case.h"
#include "core/plan/choose.h"
#include "cuda/backward/sm90/convert.cuh"
#include "cuda/backward/sm90/kernel.cuh"
#include "cuda/backward/sm90/pair_kernel.cuh"
#include "cuda/backward/sm90/shape.h"
#include "cuda/backward/wmma/bias.cuh"
#include "cuda/backward/wmma/shape.h"
#include "cuda/delta/row_blocks/kernel.cuh"
#include "cuda/reduce/partial_sums/kernel.cuh"
#include "feature_cases.h"
#include "length_cases.h"
#include "tensor_maps.h"

// The launches of backward passes by sm90, with those that all families share.
namespace {

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;
using simt::Wanted;
namespace sm90 = dlattn::backward_sm90;

template <typename T, int kTile>
void run_launch(const dlattn::BackwardParams& p, const dlattn::Plan& plan,
                const sm90::TensorMaps& maps, const dlattn::Launch& launch) {
  const auto counted = [&](sm90::Problem problem) {
    if (plan.variant == sm90::kLate) problem.dq_counters = nullptr;
    return problem;
  };
  if (launch.operation == dlattn::Operation::kDelta)
    return dlattn::delta::row_blocks::delta_kernel<T>(
        p, dlattn::delta::row_blocks::make_shape(p, plan));
  if (launch.operation == dlattn::Operation::kReduce) {
    return dlattn::reduce::partial_sums::reduce_kernel<float>(
        p, dlattn::reduce::partial_sums::make_shape(p, plan.parts_per_head));
  }
  if (launch.kernel == "wmma")
    return dlattn::backward_wmma::bias_kernel<T, kTile>(
        p, dlattn::backward_wmma::planned_shape(p, plan, dlattn::backward_wmma::kBias, kTile));
  if (launch.variant == sm90::kConvert)
    return sm90::convert_kernel<T, kTile>(counted(sm90::query_problem(p, kTile)));
  const sm90::Problem problem = sm90::key_problem(p, kTile);
  if (launch.variant == sm90::kSoftcap) return sm90::softcap_kernel<T, kTile>(problem, maps);
  if (launch.variant == sm90::kDeterministic)
    return sm90::deterministic_kernel<T, kTile>(problem, maps);
  if (launch.variant == sm90::kDeterministicSoftcap)
    return sm90::deterministic_softcap_kernel<T, kTile>(problem, maps);
  if (launch.variant == sm90::kScoreMod) return sm90::score_mod_kernel<T, kTile>(problem, maps);
  if constexpr (sm90::has_score_mod_softcap_kernel(kTile)) {
    if (launch.variant == sm90::kScoreModSoftcap)
      return sm90::score_mod_softcap_kernel<T, kTile>(problem, maps);
  }
  if constexpr (sm90::is_wide(kTile)) {
    sm90::pair_kernel<T, kTile>(problem, maps);
  } else {
    if (launch.variant == sm90::kLate) return sm90::late_kernel<T, kTile>(problem, maps);
    sm90::plain_kernel<T, kTile>(problem, maps);
  }
}

template <typename T, int kTile>
class Run {
 public:
  Run(const Case& c, const Wanted& w, bool deterministic)
      : case_(c), wanted_(w), tensors_(simt::make_backward_tensors<T>(c, w)) {
    params_ = simt::make_backward_params(c, w, tensors_);
    params_.deterministic = deterministic;
    dlattn::Options options;
    options.kernel = "sm90";
    std::vector<std::string> reasons;
    if (!dlattn::core::fastest_plan(params_, simt::hopper(), options, &plan_, &reasons))
      simt::die("no plan: %s", reasons.empty() ? "" : reasons[0].c_str());
    const std::int64_t size = plan_.workspace_bytes / 4;
    tensors_.workspace.allocate({1, 1, 1, size}, {size, size, size, 1});
    params_.forward.workspace = tensors_.workspace.data();
    params_.forward.workspace_bytes = plan_.workspace_bytes;
    poison_hidden_bias();
  }

  // Takes the kernel of long walks, which only large problems have by themselves, and which adds to
  // a sum of dQ that is zero at first. Returns whether there is one.
  bool make_late() {
    if (plan_.variant != sm90::kPlain) return false;
    plan_.variant = sm90::kLate;
    plan_.cleared_bytes = plan_.workspace_bytes - sm90::workspace_map(params_, kTile).own;
    return true;
  }

  // Returns whether all is right.
  bool operator()(const std::string& name) {
    std::string trouble;
    std::vector<unsigned char> first;
    for (const Order& order : orders()) {
      for_each_result([](auto& tensor, int) { tensor.poison(); });
      tensors_.workspace.poison();
      launch_all(order);
      std::vector<unsigned char> bytes;
      for_each_result([&](auto& tensor, int which) {
        if (!tensor.gaps_intact()) trouble = "a write outside a gradient";
        if (which == simt::kDq && !params_.deterministic) return;  // added in any order
        const std::vector<unsigned char> own = tensor.bytes();
        bytes.insert(bytes.end(), own.begin(), own.end());
      });
      if (first.empty()) first = bytes;
      if (bytes != first && !case_.sequences_overlap())
        trouble = "gradients depend on the order of threads";
    }
    return report(name, trouble);
  }

 private:
  // Bias that no head's row may see.
  void poison_hidden_bias() {
    const Case& c = case_;
    if (!tensors_.forward.bias.data() || tensors_.forward.bias.stride(2) <= 1) return;
    for (int b = 0; b < c.batch_size; ++b) {
      std::vector<bool> seen(static_cast<std::size_t>(c.seqlen_q) * c.seqlen_k);
      for (int h = 0; h < c.num_heads; ++h) {
        const auto p = simt::make_problem(c, tensors_.forward, b, h);
        for (int i = 0; i < p.seqlen_q; ++i) {
          for (int j = 0; j < p.seqlen_k; ++j) {
            if (dlattn::contains<std::int64_t>(p.positions.row(i), j) &&
                (p.mask.empty() || p.mask[static_cast<std::size_t>(i) * p.seqlen_k + j]))
              seen[static_cast<std::size_t>(i) * c.seqlen_k + j] = true;
          }
        }
      }
      for (int i = 0; i < c.seqlen_q; ++i) {
        for (int j = 0; j < c.seqlen_k; ++j) {
          if (!seen[static_cast<std::size_t>(i) * c.seqlen_k + j])
            tensors_.forward.bias.at(b, 0, i, j) = static_cast<T>(NAN);
        }
      }
    }
  }

  bool stores_first() const {
    return plan_.variant != sm90::kLate && sm90::stores_first_dq(params_, kTile);
  }

  // The order of threads, and how many of the backward kernel's blocks run at once.
  struct Order {
    simt::Schedule schedule;
    unsigned blocks;
  };
  // With two blocks ThreadSanitizer sees additions that nothing orders.
  std::vector<Order> orders() const {
    const bool ordered = params_.deterministic || stores_first();
    if (ordered && simt::kThreadSanitizer) return {{3, 2}};
    if (ordered) return {{simt::schedules()[0], 1}, {3, 2}};
    std::vector<Order> orders;
    for (const simt::Schedule schedule : simt::schedules()) orders.push_back({schedule, 1});
    return orders;
  }

  template <typename Visit>
  void for_each_result(Visit visit) {
    visit(tensors_.dq, simt::kDq), visit(tensors_.dk, simt::kDk), visit(tensors_.dv, simt::kDv);
    visit(tensors_.dbias, simt::kDbias), visit(tensors_.dsinks, simt::kDsinks);
    visit(tensors_.dslopes, simt::kDslopes);
  }

  void launch_all(const Order& order) {
    const sm90::TensorBoxes boxes = sm90::tensor_boxes(params_, kTile);
    const sm90::TensorMaps maps = {simt::encode(boxes.q), simt::encode(boxes.k),
                                   simt::encode(boxes.v), simt::encode(boxes.dout)};
    for (int i = 0; i < plan_.num_launches(); ++i) {
      const dlattn::Launch& launch = plan_.launch(i);
      simt::Launch threads{dim3(static_cast<unsigned>(launch.grid)), dim3(launch.num_warps * 32),
                           static_cast<std::size_t>(launch.smem_bytes), order.schedule};
      if (launch.kernel == "sm90" && launch.variant != sm90::kConvert) {
        // In the harness blocks that run at once are a cluster. There may be one too many.
        threads.cluster_size = launch.variant == sm90::kPair ? plan_.cluster_size : order.blocks;
        threads.grid.x = (threads.grid.x + order.blocks - 1) / order.blocks * order.blocks;
      }
      simt::start_early(&threads, tensors_);
      simt::launch(threads, [&] { run_launch<T, kTile>(params_, plan_, maps, launch); });
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

// Edges of tiles, which are 128 keys by 64 or 128 queries, features by themselves and together,
// rows that see nothing, grouped heads.
std::vector<Case> cases(int head_dim) {
  std::vector<Case> cases = {
      {1, 1, head_dim, kFull},
      {65, 129, head_dim, kFull},
      {260, 130, head_dim, kFull},
      {200, 300, head_dim, kCausal},
      {130, 66, head_dim, kCausal},
      {300, 40, head_dim, kCausal},
      {129, 257, head_dim, kTopLeft},
      {63, 127, head_dim - 8, kTopLeft, 2, 2, Layout::kPacked, head_dim - 16, 2},
      {33, 70, head_dim, kCausal, 4, 2, Layout::kBhsd, head_dim, 2},
      {20, 40, head_dim, kCausal, 2, 1, Layout::kBroadcast, 0, 2},
      {70, 140, head_dim, kCausal, 9, 9},
      {20, 0, head_dim, kFull},
      {0, 40, head_dim, kFull},
      {20, 20, head_dim, kFull, 1, 1, Layout::kBshd, 0, 0},
  };
  simt::append(&cases, simt::feature_cases(head_dim));
  const Case base = {35, 150, head_dim, kCausal, 2, 1, Layout::kBshd, 0, 2};
  const auto with = [&](auto set) { cases.push_back(simt::with(base, set)); };
  with([](Case& c) { c.softcap = 2.0; });
  with([](Case& c) { c.softcap = 0.5, c.causal = kFull, c.sinks = true; });
  with([](Case& c) { c.seqlen_q = 200, c.window_left = 70; });
  with([](Case& c) {
    c.seqlen_q = 200, c.seqlen_k = 300, c.causal = kFull, c.window_left = 20, c.window_right = 90;
  });
  cases.push_back(simt::with(simt::varlen(base, {9, 70, 0, 133, 1}, {133, 90, 20, 0, 260}),
                             [](Case& c) { c.softcap = 2.0, c.sinks = true, c.window_left = 45; }));
  cases.push_back(simt::with(simt::varlen(base, {200, 70}, {300, 31}),
                             [](Case& c) { c.seqused_k = {129, 20}; }));
  simt::append(&cases, simt::slice_cases({1, 1, head_dim, kCausal, 2, 1}));
  simt::append(&cases, simt::hostile_length_cases({1, 1, head_dim, kCausal, 2, 1}));
  return cases;
}

// ALiBi, bias and mask, by themselves and together: edges of tiles, in rows that are copied by
// chunks and that are not, with steps of 0 and of other signs, grouped heads, rows and tiles that
// are hidden.
std::vector<Case> score_mod_cases(int head_dim) {
  const Case base = {150, 264, head_dim, kCausal, 2, 1, Layout::kBshd, 0, 2};
  std::vector<Case> cases;
  const auto with = [&](auto set) { cases.push_back(simt::with(base, set)); };
  with([](Case& c) { c.alibi = true; });
  with([](Case& c) { c.bias = simt::Bias::kOwnDType; });
  with([](Case& c) {
    c.mask = true, c.causal = kFull, c.score_layout = simt::ScoreLayout::kAligned;
  });
  with([](Case& c) {
    c.bias = simt::Bias::kOwnDType, c.mask = true, c.alibi = true, c.sinks = true;
    c.score_layout = simt::ScoreLayout::kAligned;
  });
  with([](Case& c) { c.mask = true, c.seqlen_k = 261, c.window_left = 70; });
  with([](Case& c) {
    c.bias = simt::Bias::kOwnDType, c.score_layout = simt::ScoreLayout::kOneRow, c.causal = kFull;
  });
  with([](Case& c) {
    c.bias = simt::Bias::kOwnDType, c.mask = true, c.score_layout = simt::ScoreLayout::kOneKey;
  });
  with([](Case& c) {
    c.bias = simt::Bias::kOwnDType, c.mask = true, c.score_layout = simt::ScoreLayout::kColumns;
  });
  // Rows, and a tile of keys, that have the lowest number.
  for (const auto where : {simt::Extreme::Where::kOddRows, simt::Extreme::Where::kTile}) {
    with([where](Case& c) {
      c.bias = simt::Bias::kOwnDType, c.seqlen_q = 70;
      c.extreme.emplace().where = where, c.extreme->bias = -3.4028235e38;
    });
  }
  // The same that a bias hides, beside sinks that are none and that leave nothing of a row.
  for (const double sink : {-INFINITY, INFINITY}) {
    with([=](Case& c) {
      c.bias = simt::Bias::kOwnDType, c.sinks = true, c.seqlen_q = 70;
      c.extreme.emplace().where =
          sink < 0 ? simt::Extreme::Where::kOddRows : simt::Extreme::Where::kTile;
      c.extreme->bias = -INFINITY, c.extreme->sink = sink;
    });
  }
  const Case varlen =
      simt::with(simt::varlen(base, {9, 70, 0, 133}, {133, 90, 20, 300}), [](Case& c) {
        c.bias = simt::Bias::kOwnDType, c.mask = true, c.alibi = true;
        c.seqused_k = {129, 20, 20, 300};
      });
  const auto capped = [](const Case& c) {
    return simt::with(c, [](Case& with_cap) { with_cap.softcap = 2.0; });
  };
  for (const int like : {0, 2, 3, 4}) cases.push_back(capped(cases[like]));
  cases.push_back(capped(varlen));
  cases.push_back(varlen);
  // As 64, but for the queries of a step. Wide heads have consumers of their own.
  if (head_dim == 128) return {cases[0], cases[3], cases[5], varlen};
  if (head_dim == 256) return {cases[0], cases[1], cases[3], cases[4], capped(cases[3]), varlen};
  return cases;
}

// dbias of all of a bias, and summed over the batch: tiles that no query sees, rows that are
// hidden, grouped heads, fewer queries than a tile.
std::vector<Case> dbias_cases(int head_dim) {
  const Case base = simt::with({150, 264, head_dim, kCausal, 4, 2, Layout::kBshd, 0, 2},
                               [](Case& c) { c.bias = simt::Bias::kOwnDType; });
  std::vector<Case> cases = {base};
  if (head_dim == 128) return cases;
  cases.push_back(simt::with(base, [](Case& c) { c.softcap = 2.0; }));  // by another launch
  const auto with = [&](auto set) { cases.push_back(simt::with(base, set)); };
  with([](Case& c) { c.mask = true, c.causal = kFull, c.num_heads = 2, c.seqlen_q = 30; });
  with([](Case& c) {
    c.window_left = 40, c.seqlen_q = 264, c.sinks = true;
    c.alibi = c.alibi_per_sequence = true;
  });
  with([](Case& c) { c.batch_size = 1, c.causal = kTopLeft, c.seqlen_k = 400, c.seqlen_q = 140; });
  return cases;
}

// The same with bias, mask, ALiBi and softcap, whose kernels are asked.
std::vector<Case> deterministic_score_mod_cases(int head_dim) {
  const int keys = sm90::block_n(head_dim);
  const Case base = {keys + 9, 3 * keys + 40, head_dim, kFull, 2, 1};
  std::vector<Case> cases;
  const auto with = [&](auto set) { cases.push_back(simt::with(base, set)); };
  with([](Case& c) { c.bias = simt::Bias::kOwnDType, c.mask = true, c.batch_size = 2; });
  with([](Case& c) { c.causal = kCausal, c.alibi = true; });
  if (head_dim == 128) return cases;
  with([](Case& c) { c.causal = kCausal, c.alibi = c.mask = true, c.softcap = 2.0; });
  return cases;
}

// Several blocks that add to a tile, of which some see it and some do not, for `keys` keys a block.
std::vector<Case> deterministic_cases(int head_dim) {
  const int keys = sm90::block_n(head_dim);
  const Case base = {keys + 9, 3 * keys + 40, head_dim, kFull, 1, 1};
  std::vector<Case> cases = {base};
  const auto with = [&](auto set) { cases.push_back(simt::with(base, set)); };
  with([](Case& c) { c.causal = kCausal, c.num_heads = 2; });
  if (head_dim == 128) return cases;  // as 64, but for the queries of a step
  with([](Case& c) { c.causal = kTopLeft, c.softcap = 2.0, c.sinks = true; });
  with([&](Case& c) { c.window_left = keys / 2, c.window_right = keys / 4; });
  with([&](Case& c) {
    c.seqlen_q = 30, c.seqlen_k = keys + 20, c.num_heads = c.num_heads_kv = 9, c.causal = kCausal;
  });
  cases.push_back(simt::with(
      simt::varlen(base, {keys, 70, 0, 130}, {3 * keys + 5, 31, 20, 2 * keys + 1}),
      [&](Case& c) { c.causal = kCausal, c.seqused_k = {2 * keys + 3, 31, 5, 2 * keys + 1}; }));
  if (head_dim == 64)
    simt::append(&cases, simt::hostile_length_cases({1, 1, head_dim, kCausal, 1, 1}));
  return cases;
}

// Pairs of blocks: keys of one consumer alone and of both, one step, several, those of all heads of
// a group; head dims with columns that there are not.
std::vector<Case> pair_cases() {
  return {
      {1, 3, 256, kFull},
      {130, 66, 256, kCausal},
      {129, 257, 256, kTopLeft},
      {20, 150, 256, kCausal, 4, 1, Layout::kBroadcast, 0, 2},
      {63, 127, 248, kTopLeft, 2, 2, Layout::kPacked, 136, 2},
      simt::with(simt::varlen({35, 150, 256, kCausal, 2, 1}, {9, 70, 0, 133}, {133, 90, 20, 300}),
                 [](Case& c) { c.seqused_k = {129, 20, 20, 300}; }),
  };
}

template <typename T, int kTile>
void run_all(const simt::Arguments& arguments, const std::string& kind,
             const std::vector<Case>& cases, const Wanted& wanted, bool deterministic, int* passed,
             int* failed) {
  for (const Case& c : cases) {
    const std::string name =
        "backward sm90 " + kind + " " + dlattn::to_string(simt::DTypeOf<T>::value) + " " + c.name();
    if (simt::kThreadSanitizer && c.sequences_overlap()) continue;
    if (name.find(arguments.filter()) == std::string::npos) continue;
    const simt::HangGuard guard(name);
    const bool ok = Run<T, kTile>(c, wanted, deterministic)(name);
    ++*(ok ? passed : failed);
    if (!ok && std::getenv("SIMT_STOP_AT_FAILURE")) std::_Exit(1);
  }
}

template <typename T, int kTile>
void run_special(const simt::Arguments& arguments, int* passed, int* failed) {
  if constexpr (simt::is_built(simt::DTypeOf<T>::value, kTile)) {
    run_all<T, kTile>(arguments, "deterministic", deterministic_cases(kTile), Wanted(), true,
                      passed, failed);
    Wanted wanted;
    wanted.dbias = false;
    run_all<T, kTile>(arguments, "score_mod", score_mod_cases(kTile), wanted, false, passed,
                      failed);
    run_all<T, kTile>(arguments, "deterministic score_mod", deterministic_score_mod_cases(kTile),
                      wanted, true, passed, failed);
    wanted.dbias = true, wanted.dslopes = false;
    run_all<T, kTile>(arguments, "dbias", dbias_cases(kTile), wanted, false, passed, failed);
    wanted.per[0] = false, wanted.dslopes = true;
    run_all<T, kTile>(arguments, "shared dbias", dbias_cases(kTile), wanted, false, passed, failed);
    run_all<T, kTile>(arguments, "deterministic shared dbias",
                      {deterministic_score_mod_cases(kTile)[0]}, wanted, true, passed, failed);
    wanted.per[1] = false;
    run_all<T, kTile>(arguments, "summed dbias", {dbias_cases(kTile)[0]}, wanted, false, passed,
                      failed);
    if constexpr (sm90::is_wide(kTile))
      run_all<T, kTile>(arguments, "pair", pair_cases(), Wanted(), false, passed, failed);
  }
}

template <typename T, int kTile>
void run(const simt::Arguments& arguments, int* passed, int* failed) {
  run_special<T, kTile>(arguments, passed, failed);
  if constexpr (simt::is_built(simt::DTypeOf<T>::value, kTile)) {
    int number = 0;
    for (const Case& c : cases(kTile)) {
      Wanted w;
      // With one key and no dlse, gradients of scores are 0 but for rounding.
      w.dlse = ++number % 3 != 0 || c.window_left == 0;
      if (kTile > 64 && number % (kTile / 64) != 0 && c.softcap == 0.0) continue;  // for time
      if (number % 8 == 1) w.dq = false;
      if (number % 8 == 4) w.dk = false;
      if (number % 8 == 7) w.dv = false;
      if (number % 10 == 3) w.dout_scale = 1e-4;
      const std::string name = std::string("backward sm90 ") +
                               dlattn::to_string(simt::DTypeOf<T>::value) + " " + c.name() +
                               w.name();
      // Blocks that write the same rows race.
      if (simt::kThreadSanitizer && c.sequences_overlap()) continue;
      if (name.find(arguments.filter()) == std::string::npos) continue;
      const simt::HangGuard guard(name);
      for (const bool late : {false, true}) {
        Run<T, kTile> own(c, w, false);
        if (late && !own.make_late()) break;
        const bool ok = own(name + (late ? " late" : ""));
        ++*(ok ? passed : failed);
        if (!ok && std::getenv("SIMT_STOP_AT_FAILURE")) std::_Exit(1);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  int passed = 0, failed = 0;
  run<half, 64>(arguments, &passed, &failed), run<__nv_bfloat16, 64>(arguments, &passed, &failed);
  run<half, 128>(arguments, &passed, &failed), run<__nv_bfloat16, 128>(arguments, &passed, &failed);
  run<half, 256>(arguments, &passed, &failed), run<__nv_bfloat16, 256>(arguments, &passed, &failed);
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0 || passed == 0;
}
