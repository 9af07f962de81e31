#define SIMT_SANITIZED_TILE 512

#include "attention_test.h"
#include "cuda/forward/wmma_halves/kernel.cuh"
#include "feature_cases.h"
#include "length_cases.h"

namespace {

constexpr std::string_view kFamily = "wmma_halves";

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;

template <typename T>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  simt::with_instance<kFamily, T>(
      head_dim_tile, [&](auto tile) { dlattn::wmma_halves::kernel<T, tile>(params, shape); });
}

// Score features by themselves and together, with tensors of scores of every layout.
std::vector<Case> score_cases() {
  using simt::Bias, simt::ScoreLayout;
  const Case base = {35, 70, 320, kCausal, 2, 1, Layout::kBshd, 0, 2};
  std::vector<Case> cases = {
      simt::with(base, [](Case& c) { c.softcap = 1.5; }),
      simt::with(base, [](Case& c) { c.alibi = true, c.causal = kFull; }),
      simt::with(simt::varlen(base, {9, 70}, {73, 40}),
                 [](Case& c) {
                   c.softcap = 2.0, c.alibi = true, c.bias = Bias::kFloat32;
                   c.mask = true, c.sinks = true, c.window_left = 15;
                 }),
  };
  for (const auto layout : {ScoreLayout::kAligned, ScoreLayout::kRows, ScoreLayout::kOneRow,
                            ScoreLayout::kOneKey, ScoreLayout::kColumns}) {
    const bool wide = layout == ScoreLayout::kRows || layout == ScoreLayout::kColumns;
    cases.push_back(simt::with(base, [=](Case& c) {
      c.bias = wide ? Bias::kFloat32 : Bias::kOwnDType, c.score_layout = layout,
      c.causal = kTopLeft;
    }));
    cases.push_back(simt::with(base, [=](Case& c) { c.mask = true, c.score_layout = layout; }));
  }
  return cases;
}

std::vector<Case> cases() {
  std::vector<Case> cases = {
      // Lengths at the edges of row groups and tiles.
      {1, 1, 257, kFull, 3},
      {17, 31, 512, kCausal},
      {16, 33, 384, kFull},
      {65, 130, 512, kCausal},
      {15, 64, 336, kTopLeft},
      {33, 65, 448, kFull},
      {66, 97, 505, kCausal},
      // Rows that see nothing: some of a row group, whole row groups, a whole tile; no keys, no
      // queries, an empty batch.
      {100, 40, 320, kCausal},
      {20, 0, 512, kCausal},
      {0, 20, 512, kFull},
      {20, 20, 512, kFull, 1, 1, Layout::kBshd, 0, 0},
      // Heads, and v wider or narrower than q: to less than a half, and from it.
      {40, 70, 512, kCausal, 4, 2, Layout::kBshd, 72},
      {20, 70, 40, kFull, 3, 1, Layout::kBhsd, 512, 2},
      {20, 70, 264, kFull, 2, 1, Layout::kBshd, 257},
      // Rows aligned to 8, 4 and 2 bytes, and other strides.
      {20, 50, 512, kCausal, 2, 1, Layout::kAlign8},
      {40, 70, 320, kFull, 2, 1, Layout::kAlign4, 300},
      {20, 50, 512, kCausal, 2, 1, Layout::kAlign2},
      {20, 50, 333, kCausal, 2, 2, Layout::kPacked, 0, 2, false},
      {20, 50, 320, kTopLeft, 2, 1, Layout::kBroadcast, 0, 2},
  };
  simt::append(&cases, simt::feature_cases(512));
  simt::append(&cases, score_cases());
  // Rows of so many keys that they are set aside in the builds with a sanitizer, where maxima rise
  // from tile to tile, or not; out in pairs that are aligned to 4 bytes and no more.
  for (const double rise : {0.0, 0.3, -200.0})
    cases.push_back(simt::with({20, 300, 512, kFull}, [=](Case& c) { c.rise = rise; }));
  cases.push_back({20, 300, 512, kFull, 1, 1, Layout::kAlign4, 258});
  if (simt::kThreadSanitizer) return cases;
  simt::append(&cases, simt::length_and_score_cases(264));
  // Small problems with all features, at random.
  for (unsigned seed = 0; seed < 16; ++seed) {
    Case c = simt::random_case(seed);
    c.head_dim += 256;
    if (c.head_dim_v) c.head_dim_v += seed % 2 * 256;
    cases.push_back(c);
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::Tests tests("wmma_halves", arguments);
  for (const Case& c : arguments.cases(cases())) {
    tests.run<half>(kFamily, c, run_kernel<half>);
    tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16>);
  }
  return tests.finish();
}
