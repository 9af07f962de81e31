#include "attention_test.h"
#include "cache_cases.h"
#include "cuda/forward/scalar/kernel.cuh"
#include "cuda/forward/scalar/shape.h"
#include "feature_cases.h"
#include "length_cases.h"

namespace {

constexpr std::string_view kFamily = "scalar";

using simt::Cache;
using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;

template <typename T>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  simt::with_instance<kFamily, T>(
      head_dim_tile, [&](auto tile) { dlattn::scalar::kernel<T, tile, false>(params, shape); });
}

// The score features that scalar alone has: each by itself, then all of them.
std::vector<Case> score_cases() {
  const Case base = {20, 50, 40, kCausal, 2, 1, Layout::kBshd, 0, 2};
  return {
      simt::with(base, [](Case& c) { c.softcap = 1.5; }),
      simt::with(base, [](Case& c) { c.alibi = true; }),
      simt::with(base, [](Case& c) { c.bias = simt::Bias::kOwnDType; }),
      simt::with(base, [](Case& c) { c.bias = simt::Bias::kFloat32; }),
      simt::with(base, [](Case& c) { c.mask = true; }),
      simt::with(simt::varlen(base, {9, 40}, {33, 20}),
                 [](Case& c) {
                   c.causal = kFull, c.softcap = 2.0, c.alibi = true;
                   c.bias = simt::Bias::kFloat32, c.mask = true, c.sinks = true;
                   c.window_left = 15;
                 }),
  };
}

// Tiles are 32 keys by 32 rows (16 for wide fp32 rows), 8 (4) rows a warp.
std::vector<Case> cases() {
  std::vector<Case> cases = {
      {1, 1, 1, kFull, 3},
      {9, 33, 40, kCausal},
      {33, 65, 64, kCausal},
      {17, 31, 72, kTopLeft},
      {15, 64, 128, kFull},
      {5, 40, 256, kCausal},
      {40, 20, 24, kCausal},  // rows that see nothing
      {20, 0, 64, kCausal},
      {0, 20, 64, kFull},
      {20, 20, 64, kFull, 1, 1, Layout::kBshd, 0, 0},
      {10, 40, 20, kCausal, 4, 2, Layout::kBshd, 72},
      {10, 40, 72, kFull, 3, 1, Layout::kBhsd, 7, 2},
      {10, 40, 32, kCausal, 2, 1, Layout::kAlign8},
      {10, 40, 32, kFull, 2, 1, Layout::kAlign4},
      {10, 40, 33, kCausal, 2, 1, Layout::kAlign2},
      {10, 40, 32, kCausal, 2, 2, Layout::kPacked, 0, 2, false},
      {10, 40, 32, kTopLeft, 2, 1, Layout::kBroadcast, 0, 2},
  };
  simt::append(&cases, simt::feature_cases(24));
  simt::append(&cases, score_cases());
  simt::append(&cases, simt::length_cases(40));
  simt::append(&cases, simt::length_and_score_cases(72));
  simt::append(&cases, simt::run_cases(72));
  if (simt::kThreadSanitizer) return cases;
  const std::vector<Case> more = {
      {15, 15, 64, kFull},
      {16, 16, 64, kCausal},
      {31, 33, 64, kTopLeft},
      {32, 32, 64, kCausal},
      {63, 65, 64, kFull},
      {1, 200, 64, kCausal},
      {100, 1, 64, kFull},
      {100, 173, 40, kCausal, 4, 2},
      {100, 60, 64, kCausal, 2, 1},
      {100, 60, 64, kTopLeft, 2, 1},
      {33, 300, 256, kCausal, 2, 2},
      simt::with({20, 300, 40, kFull, 2, 1},
                 [](Case& c) { c.bias_rise = 1.0, c.bias = simt::Bias::kFloat32, c.mask = true; }),
      {33, 70, 256, kTopLeft, 2, 2},
      {33, 70, 200, kFull, 4, 1},
      {20, 50, 256, kCausal, 2, 1, Layout::kBshd, 1},
      {20, 50, 1, kCausal, 2, 1, Layout::kBshd, 256},
      {20, 50, 130, kCausal, 2, 1, Layout::kAlign4, 66},
      {40, 50, 64, kCausal, 2, 2, Layout::kPacked, 0, 2},
      {40, 50, 64, kCausal, 2, 2, Layout::kBhsd, 0, 2, false},
  };
  simt::append(&cases, more);
  return cases;
}

using simt::CachedCase;

// Lengths at the edges of pages and tiles and beyond what there is, pages and entries that there
// are not, padding, windows, every score feature, any alignment.
std::vector<CachedCase> cached_cases() {
  const auto scores = [](Case& c) {
    c.softcap = 2.0, c.alibi = true, c.bias = simt::Bias::kFloat32, c.mask = true, c.sinks = true;
  };
  std::vector<CachedCase> cases = {
      {{1, 90, 64, kCausal, 4, 1, Layout::kBshd, 0, 5}, {{0, 1, 32, 90, 300}}},
      {{3, 70, 40, kCausal, 4, 2, Layout::kBhsd, 0, 3}, {{17, 70, -3}, 16}},
      {{2, 90, 64, kFull, 2, 1, Layout::kBshd, 0, 2}, {{90, 33}, 16, {}, {}, true, true}},
      {{1, 90, 64, kFull, 2, 1, Layout::kBshd, 0, 2}, {{90, 40}, 1, {}, {}, true, true}},
      {{1, 60, 64, kFull, 2, 1, Layout::kBshd, 0, 2}, {{60, 50}, 0, {-5, 7}, {INT32_MIN, 3}}},
      {{40, 70, 72, kCausal, 2, 1, Layout::kBshd, 0, 2}, {{70, 39}, 48}},
      {{2, 70, 64, kCausal, 2, 1, Layout::kBshd, 0, 3},
       {{INT32_MAX, INT32_MIN, 40}, 7, {}, {33, 0, INT32_MAX}}},
      {{2, 60, 33, kCausal, 2, 1, Layout::kAlign2, 0, 2}, {{60, 31}, 16}},
      {{2, 60, 34, kCausal, 2, 1, Layout::kAlign4, 0, 2}, {{60, 31}, 0, {2, 0}}},
      {{2, 60, 36, kFull, 2, 1, Layout::kAlign8, 0, 2}, {{60, 31}, 16}},
      {simt::with({2, 90, 64, kCausal, 4, 2, Layout::kBshd, 0, 2}, scores), {{90, 60}, 16}},
      {simt::with({5, 80, 20, kCausal, 2, 2, Layout::kPacked, 24, 2},
                  [&](Case& c) { scores(c), c.window_left = 20; }),
       {{80, 41}, 16, {}, {3, 0}}},
      {simt::with({3, 120, 64, kCausal, 2, 1, Layout::kBhsd, 0, 2},
                  [](Case& c) { c.window_left = 5; }),
       {{120, 77}, 1}},
      // The keys that there is room for, with padding.
      {{4, 50, 64, kTopLeft, 2, 1, Layout::kBshd, 0, 3}, {{50, 50, 50}, 0, {}, {17, 0, 3}, false}},
  };
  if (simt::kThreadSanitizer) return cases;
  cases.push_back({{1, 300, 256, kFull, 2, 1, Layout::kBshd, 0, 2}, {{300, 35}, 7}});
  cases.push_back({{20, 200, 128, kCausal, 8, 2, Layout::kBshd, 72, 3}, {{200, 40, 129}, 16}});
  return cases;
}

// `KV`: the type of the elements of the cache.
template <typename T, typename KV = T>
void run_cached(simt::Tests& tests, const CachedCase& d, const char* filter) {
  const Case& c = d.sizes;
  if (c.layout == Layout::kAlign2 && sizeof(T) == 4) return;
  constexpr dlattn::DType kDType = simt::DTypeOf<T>::value, kKeys = simt::DTypeOf<KV>::value;
  const std::string name = std::string("scalar ") + dlattn::to_string(kDType) + " " + c.name() +
                           d.cache.name() + " keys " + dlattn::to_string(kKeys);
  if (name.find(filter) == std::string::npos) return;
  simt::Tensors<T> t = simt::make_tensors<T>(c);
  dlattn::AttentionParams params = simt::make_params(c, t, kDType, kDType);
  const simt::Pool<T, KV> pool(c, d.cache, t);
  pool.describe(d.cache, &params);
  dlattn::Options options;
  options.kernel = kFamily;
  const dlattn::Plan plan = dlattn::core::make_plan(params, simt::ada(), options);
  if (!simt::is_built(kDType, plan.head_dim_tile)) return;
  const simt::HangGuard guard(name);
  std::string trouble;
  std::vector<unsigned char> first_out;
  for (const simt::Schedule schedule : simt::schedules()) {
    t.out.poison(), t.lse.poison();
    const dlattn::LaunchShape shape = dlattn::scalar::make_shape(params, plan);
    simt::Launch threads{dim3(static_cast<unsigned>(plan.grid)), dim3(plan.num_warps * 32),
                         static_cast<std::size_t>(plan.smem_bytes), schedule};
    simt::start_early(&threads, t);
    simt::with_instance<kFamily, T>(plan.head_dim_tile, [&](auto tile) {
      simt::launch(threads, [&] { dlattn::scalar::kernel<T, tile, true>(params, shape); });
    });
    if (first_out.empty()) first_out = t.out.bytes();
    if (t.out.bytes() != first_out) trouble = "out depends on the order of threads";
    if (!t.out.gaps_intact() || !t.lse.gaps_intact()) trouble = "a write outside out or lse";
  }
  const auto problem_of = [&](int batch, int head) {
    return simt::cached_problem(c, d.cache, t, batch, head);
  };
  tests.report(name, simt::compare(c, t, simt::plain_rounding<T, T>(272.0f), problem_of), kDType,
               trouble);
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::Tests tests("scalar", arguments);
  for (const Case& c : arguments.cases(cases())) {
    tests.run<half>(kFamily, c, run_kernel<half>);
    tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16>);
    if (c.layout != Layout::kAlign2) tests.run<float>(kFamily, c, run_kernel<float>);
  }
  for (const CachedCase& c : cached_cases()) {
    run_cached<half>(tests, c, arguments.filter());
    run_cached<__nv_bfloat16>(tests, c, arguments.filter());
    run_cached<float>(tests, c, arguments.filter());
    run_cached<half, std::int8_t>(tests, c, arguments.filter());
    run_cached<__nv_bfloat16, __nv_fp8_e4m3>(tests, c, arguments.filter());
  }
  return tests.finish();
}
