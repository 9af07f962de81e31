#include "cuda/forward/wmma/general.cuh"
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

template <typename T>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  simt::with_instance<kFamily, T>(
      head_dim_tile, [&](auto tile) { dlattn::wmma::general_kernel<T, tile>(params, shape); });
}

// The score features by themselves, with rows and columns of every kind, then together. Tiles are
// 64 rows by 64 or 32 keys; a run of a lane's keys is 16 or 8.
std::vector<Case> score_cases() {
  using simt::Bias, simt::ScoreLayout;
  const Case base = {70, 150, 40, kCausal, 2, 1, Layout::kBshd, 0, 2};
  const auto bias = [&](Bias bias, ScoreLayout layout, int seqlen_k) {
    return simt::with(
        base, [=](Case& c) { c.bias = bias, c.score_layout = layout, c.seqlen_k = seqlen_k; });
  };
  const auto mask = [&](ScoreLayout layout, int seqlen_k) {
    return simt::with(
        base, [=](Case& c) { c.mask = true, c.score_layout = layout, c.seqlen_k = seqlen_k; });
  };
  return {
      simt::with(base, [](Case& c) { c.softcap = 1.5; }),
      simt::with(base, [](Case& c) { c.alibi = true, c.causal = kFull; }),
      bias(Bias::kOwnDType, ScoreLayout::kAligned, 150),
      bias(Bias::kOwnDType, ScoreLayout::kRows, 150),
      bias(Bias::kOwnDType, ScoreLayout::kRows, 149),
      bias(Bias::kFloat32, ScoreLayout::kRows, 149),
      bias(Bias::kFloat32, ScoreLayout::kOneRow, 160),
      mask(ScoreLayout::kAligned, 150),
      mask(ScoreLayout::kRows, 149),
      mask(ScoreLayout::kOneRow, 150),
      mask(ScoreLayout::kOneKey, 150),
      mask(ScoreLayout::kColumns, 150),
  };
}

std::vector<Case> combined_cases(int head_dim) {
  const Case base = {70, 150, head_dim, kFull, 2, 1, Layout::kBshd, 0, 2};
  return {
      simt::with(simt::varlen(base, {9, 70}, {133, 90}),
                 [](Case& c) {
                   c.softcap = 2.0, c.alibi = true, c.bias = simt::Bias::kFloat32;
                   c.mask = true, c.sinks = true, c.window_left = 15;
                 }),
      simt::with(base,
                 [](Case& c) {
                   c.bias = simt::Bias::kOwnDType, c.mask = true, c.sinks = true;
                   c.causal = kTopLeft;
                   c.score_layout = simt::ScoreLayout::kAligned;
                 }),
  };
}

// Scores that rise in later tiles beyond what float16 holds of probabilities, and beyond what fp32
// does, by q and k or by the bias.
std::vector<Case> rising_cases(int head_dim) {
  const Case base = {20, 200, head_dim, kFull};
  std::vector<Case> cases;
  for (const double rise : {1.0, 4.0}) {
    cases.push_back(simt::with(base, [=](Case& c) { c.rise = rise, c.mask = true; }));
    cases.push_back(simt::with(base, [=](Case& c) { c.rise = rise, c.alibi = true; }));
    cases.push_back(simt::with(base, [=](Case& c) {
      c.bias_rise = rise, c.bias = simt::Bias::kOwnDType, c.softcap = 5.0;
    }));
    cases.push_back(simt::with(
        base, [=](Case& c) { c.bias_rise = rise, c.bias = simt::Bias::kFloat32, c.mask = true; }));
  }
  return cases;
}

std::vector<Case> cases() {
  std::vector<Case> cases = {
      {1, 1, 1, kFull, 3},
      {17, 31, 23, kCausal},
      {33, 65, 64, kFull},
      {15, 64, 73, kTopLeft},
      {66, 97, 127, kCausal},
      {31, 63, 161, kFull},
      {66, 97, 249, kCausal},
      // Rows that see nothing; no keys; no queries.
      {150, 40, 31, kCausal},
      {20, 0, 60, kCausal},
      {0, 20, 60, kFull},
      // Heads, and v wider or narrower than q.
      {10, 40, 20, kCausal, 4, 2, Layout::kBshd, 72},
      {10, 40, 72, kFull, 3, 1, Layout::kBhsd, 7, 2},
      // Rows aligned to 8, 4 and 2 bytes, with several tiles of keys.
      {40, 150, 32, kCausal, 2, 1, Layout::kAlign8},
      {40, 150, 64, kFull, 2, 1, Layout::kAlign4},
      {40, 150, 33, kCausal, 2, 1, Layout::kAlign2},
      {20, 100, 250, kCausal, 2, 1, Layout::kAlign4, 130},
      {20, 50, 33, kCausal, 2, 2, Layout::kPacked, 0, 2, false},
      {20, 50, 32, kTopLeft, 2, 1, Layout::kBroadcast, 0, 2},
  };
  simt::append(&cases, simt::feature_cases(36));
  simt::append(&cases, score_cases());
  simt::append(&cases, combined_cases(128));
  simt::append(&cases, rising_cases(64));
  simt::append(&cases, simt::length_and_score_cases(60));
  if (simt::kThreadSanitizer) return cases;
  for (const int head_dim : {20, 64, 88, 180, 256}) {
    simt::append(&cases, combined_cases(head_dim));
  }
  for (const int head_dim : {96, 256}) simt::append(&cases, rising_cases(head_dim));
  for (Case c : score_cases()) {
    c.head_dim = 96;
    cases.push_back(c);
  }
  return cases;
}

// The one query of each sequence, with what every row of its heads needs by itself.
std::vector<Case> packed_cases() {
  std::vector<Case> cases = simt::packed_cases(48);
  const Case base = {1, 150, 60, kCausal, 8, 2, Layout::kAlign8, 0, 2};
  for (const auto layout :
       {simt::ScoreLayout::kRows, simt::ScoreLayout::kColumns, simt::ScoreLayout::kOneRow}) {
    cases.push_back(simt::with(base, [=](Case& c) {
      c.softcap = 2.0, c.bias = simt::Bias::kFloat32, c.mask = true, c.window_left = 70;
      c.score_layout = layout;
    }));
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::WmmaTests tests("wmma_general", arguments);
  for (const Case& c : arguments.cases(cases())) {
    tests.run<half>(kFamily, c, run_kernel<half>, "general");
    tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16>, "general");
  }
  for (const Case& c : arguments.cases(packed_cases())) {
    tests.run<half>(kFamily, c, run_kernel<half>, "general+packed");
    tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16>, "general+packed");
  }
  return tests.finish();
}
