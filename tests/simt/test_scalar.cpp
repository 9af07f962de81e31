#include "attention_test.h"
#include "cuda/forward/scalar/kernel.cuh"
#include "feature_cases.h"
#include "length_cases.h"

namespace {

constexpr std::string_view kFamily = "scalar";

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;

template <typename T>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  simt::with_instance<kFamily, T>(
      head_dim_tile, [&](auto tile) { dlattn::scalar::kernel<T, tile>(params, shape); });
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

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::Tests tests("scalar", arguments);
  for (const Case& c : arguments.cases(cases())) {
    tests.run<half>(kFamily, c, run_kernel<half>);
    tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16>);
    if (c.layout != Layout::kAlign2) tests.run<float>(kFamily, c, run_kernel<float>);
  }
  return tests.finish();
}
