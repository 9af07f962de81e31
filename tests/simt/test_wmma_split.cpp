#include "cuda/forward/wmma/split.cuh"
#include "cuda/forward/wmma/traits.h"
#include "feature_cases.h"
#include "length_cases.h"
#include "wmma_test.h"

namespace {

constexpr std::string_view kFamily = "wmma";

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;

using dlattn::wmma::kSinglePass;
using dlattn::wmma::kSplit;

template <typename T, int kVariant>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  simt::with_instance<kFamily, T>(head_dim_tile, [&](auto tile) {
    if constexpr (dlattn::wmma::has_variant(tile, kVariant))
      dlattn::wmma::split_kernel<T, tile, kVariant>(dlattn::wmma::make_split_params(params, shape));
  });
}

// Whole: groups without tiles, with one and with two; the last of 512 keys; masks at both ends of a
// walk, rows that see nothing.
std::vector<Case> single_pass_cases() {
  std::vector<Case> cases = {
      {1, 1, 64, kFull},
      {33, 130, 40, kTopLeft},
      {40, 300, 64, kCausal, 4, 2},
      {20, 511, 64, kFull, 2, 1, Layout::kPacked},
      {20, 512, 64, kCausal, 1, 1, Layout::kBshd, 48},
      {20, 0, 64, kCausal},
      {110, 40, 64, kCausal},
      simt::with({60, 500, 56, kCausal, 2, 1}, [](Case& c) { c.window_left = 300; }),
  };
  simt::append(&cases, simt::feature_cases(64));
  if (simt::kThreadSanitizer) return cases;
  const std::vector<Case> more = {
      {33, 64, 64, kFull},
      {33, 257, 64, kFull},
      {129, 384, 64, kCausal, 2, 2, Layout::kBhsd, 0, 2, false},
      {3, 449, 64, kTopLeft, 2, 1, Layout::kBroadcast, 0, 2},
      simt::with({40, 512, 64, kFull, 2, 1},
                 [](Case& c) { c.window_left = 100, c.window_right = 40; }),
  };
  simt::append(&cases, more);
  return cases;
}

// Tiles are 16 or 32 keys by 32 rows; 4 groups take them in turn, with two stages each.
std::vector<Case> cases() {
  std::vector<Case> cases = {
      // One key, one tile, groups without tiles, with one tile, with one more than others, with so
      // many that their stages are used again.
      {1, 1, 8, kFull},
      {17, 31, 24, kCausal},
      {33, 65, 64, kFull},
      {40, 200, 64, kCausal},
      {20, 500, 64, kFull},
      {15, 64, 72, kTopLeft},
      {31, 63, 104, kFull},
      {40, 97, 128, kCausal},
      {40, 400, 128, kFull},
      {33, 400, 96, kCausal},
      {20, 700, 32, kFull},
      // Rows that see nothing: some of a warp's, whole warps', a whole block's.
      {110, 40, 32, kCausal},
      {75, 20, 128, kCausal},
      // Masked tiles at both ends of a walk.
      simt::with({40, 600, 64, kCausal, 2, 1}, [](Case& c) { c.window_left = 300; }),
  };
  simt::append(&cases, simt::shape_cases());
  simt::append(&cases, simt::feature_cases(40));
  simt::append(&cases, simt::length_cases(64));
  if (simt::kThreadSanitizer) return cases;
  const std::vector<Case> more = {
      {15, 15, 64, kFull},
      {32, 128, 64, kCausal},
      {33, 129, 64, kTopLeft},
      {64, 64, 128, kCausal},
      {65, 33, 128, kFull},
      {1, 300, 64, kCausal},
      {100, 1, 64, kFull},
      {3, 300, 128, kFull},
      {50, 173, 64, kCausal, 4, 2},
      {83, 50, 128, kTopLeft, 2, 1},
      {50, 173, 96, kFull, 4, 1},
      {50, 90, 128, kCausal, 2, 1, Layout::kBshd, 16},
      {50, 90, 16, kCausal, 2, 1, Layout::kBshd, 128},
      {40, 90, 120, kCausal, 2, 2, Layout::kBhsd, 0, 2, false},
      simt::with({40, 300, 128, kFull, 2, 1},
                 [](Case& c) { c.window_left = 100, c.window_right = 40; }),
  };
  simt::append(&cases, more);
  return cases;
}

// `packing` is part of the variant's name.
template <int kVariant>
void run(simt::Tests& tests, const Case& c, const std::string& packing) {
  tests.plan_for(kVariant == kSinglePass ? simt::hopper() : simt::ada());
  const std::string variant = dlattn::wmma::kVariantNames[kVariant] + packing;
  tests.run<half>(kFamily, c, run_kernel<half, kVariant>, variant.c_str());
  tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16, kVariant>, variant.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::WmmaTests tests("wmma_split", arguments);
  for (const Case& c : arguments.cases(cases())) {
    run<kSplit>(tests, c, "+unpacked");
    if (c.seed) run<kSinglePass>(tests, c, "+unpacked");
  }
  for (const Case& c : arguments.cases(single_pass_cases()))
    run<kSinglePass>(tests, c, "+unpacked");
  for (const int head_dim : {64, 104}) {
    if ((simt::kThreadSanitizer || arguments.values()) && head_dim != 64) continue;
    for (const Case& c : arguments.cases(simt::packed_cases(head_dim))) {
      run<kSplit>(tests, c, "+packed");
      run<kSinglePass>(tests, c, "+packed");
    }
  }
  return tests.finish();
}
