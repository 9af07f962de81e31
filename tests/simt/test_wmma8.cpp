#include "attention_test.h"
#include "cuda/forward/wmma8/kernel.cuh"
#include "float8_cases.h"
#include "value_cases.h"
#include "wmma_cases.h"

namespace {

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;

constexpr std::string_view kFamily = "wmma8";
using Element = __nv_fp8_e4m3;

void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  simt::with_instance<kFamily, Element>(head_dim_tile, [&](auto tile) {
    if (dlattn::wmma8::is_general(params, shape.copy_bytes))
      return dlattn::wmma8::kernel<tile, true>(params, shape);
    dlattn::wmma8::kernel<tile, false>(params, shape);
  });
}

std::vector<Case> cases_of_bytes() {
  const Case heads = {40, 90, 64, kCausal, 4, 2};
  const auto set_descales = [](Case& c) { c.descales = true; };
  std::vector<Case> cases = {
      simt::with(heads, set_descales),
      simt::with(heads, [](Case& c) { c.descales = c.q_descale_by_kv_head = true; }),
      simt::with({70, 33, 128, kTopLeft, 2, 1, simt::Layout::kBshd, 0, 2}, set_descales),
      simt::with(simt::varlen(heads, {1, 33, 0, 70}, {40, 17, 8, 65}), set_descales),
      // Scores of 0, and a head that is NaN.
      simt::with(heads, [](Case& c) { c.descales = true, c.k_descale = 0.0f; }),
      // Softcap counts descales, in tiles under a mask and without.
      simt::with(heads, [](Case& c) { c.softcap = 5.0, c.descales = true, c.sinks = true; }),
      simt::with({20, 150, 128, kFull, 2, 1}, [](Case& c) { c.softcap = 0.5; }),
      simt::with({33, 70, 112, kCausal, 2, 1}, [](Case& c) { c.softcap = 3.0; }),
      // The largest tile.
      {65, 130, 256, kCausal, 2, 1},
      {17, 33, 144, kFull, 1, 1, simt::Layout::kBhsd, 256},
      // Lengths that others have been wrong at.
      {1, 1, 128, kCausal},
      {9, 9, 128, kCausal},
      {12, 12, 64, kFull},
      {12, 503, 64, kCausal},
  };
  for (const int head_dim : {64, 128, 256}) {
    for (const simt::ScoreLayout layout :
         {simt::ScoreLayout::kRows, simt::ScoreLayout::kOneRow, simt::ScoreLayout::kColumns}) {
      cases.push_back(simt::with({40, 150, head_dim, kCausal, 2, 1}, [=](Case& c) {
        c.bias = simt::Bias::kFloat32, c.mask = layout != simt::ScoreLayout::kRows;
        c.score_layout = layout, c.descales = true;
      }));
    }
    cases.push_back(simt::with({70, 90, head_dim, kFull, 2, 1, simt::Layout::kBshd, 0, 2},
                               [](Case& c) { c.mask = c.sinks = true; }));
  }
  simt::append(&cases, simt::extreme_bias_cases({20, 200, 64, kFull, 2, 1}));
  cases.push_back(simt::with({20, 300, 64, kFull}, [](Case& c) {
    c.bias = simt::Bias::kFloat32, c.softcap = 5.0, c.bias_rise = 1e6;
  }));
  // Maxima that rise from tile to tile, and a row's first ones that are next to nothing.
  for (const double rise : {0.3, 4.0, -20.0})
    cases.push_back(simt::with({20, 300, 64, kFull}, [=](Case& c) { c.rise = rise; }));
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::Tests tests("wmma8", arguments);
  tests.hold_to(256.0f);  // the row max is known
  std::vector<Case> cases = cases_of_bytes();
  simt::append(&cases, simt::wmma_cases(simt::kThreadSanitizer));
  simt::run_float8(&tests, arguments.cases(cases), kFamily, run_kernel);
  return tests.finish();
}
