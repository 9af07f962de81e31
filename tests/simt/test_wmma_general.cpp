#include "attention_test.h"
#include "cuda/wmma/general.cuh"
#include "feature_cases.h"

namespace {

using dlattn::DType;
using dlattn::Kernel;
using simt::Case;
using simt::Layout;

// The instance of instances.cmake that a plan names.
template <typename T>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
#define DLATTN_INSTANCE(family, dtype, tile)                                                  \
  if constexpr (Kernel::family == Kernel::kWmma && DType::dtype == simt::DTypeOf<T>::value) { \
    if (head_dim_tile == tile) return dlattn::wmma::general_kernel<T, tile>(params, shape);   \
  }
#include "instances.inc"
#undef DLATTN_INSTANCE
  simt::die("no instance for head_dim_tile %d", head_dim_tile);
}

// The score features, each by itself, then all of them. Tiles are 64 or 32 keys by 64 rows.
std::vector<Case> score_cases(int head_dim) {
  const Case base = {70, 150, head_dim, simt::Causal::kBottomRight, 2, 1, Layout::kBshd, 0, 2};
  return {
      simt::with(base, [](Case& c) { c.softcap = 1.5; }),
      simt::with(base, [](Case& c) { c.alibi = true; }),
      simt::with(base, [](Case& c) { c.bias = simt::Bias::kOwnDType; }),
      simt::with(base, [](Case& c) { c.bias = simt::Bias::kFloat32; }),
      simt::with(base, [](Case& c) { c.mask = true; }),
      simt::with(simt::varlen(base, {9, 70}, {133, 90}),
                 [](Case& c) {
                   c.causal = simt::Causal::kNone, c.softcap = 2.0, c.alibi = true;
                   c.bias = simt::Bias::kFloat32, c.mask = true, c.sinks = true;
                   c.window_left = 15;
                 }),
  };
}

std::vector<Case> cases() {
  constexpr simt::Causal kFull = simt::Causal::kNone, kCausal = simt::Causal::kBottomRight,
                         kTopLeft = simt::Causal::kTopLeft;
  std::vector<Case> cases = {
      {1, 1, 1, kFull, 3},
      {17, 31, 23, kCausal},
      {33, 65, 64, kFull},
      {130, 200, 64, kCausal},
      {15, 64, 72, kTopLeft},
      {66, 97, 128, kCausal},
      {150, 40, 32, kCausal},
      {20, 0, 64, kCausal},
      {0, 20, 64, kFull},
      {10, 40, 20, kCausal, 4, 2, Layout::kBshd, 72},
      {10, 40, 72, kFull, 3, 1, Layout::kBhsd, 7, 2},
      {10, 40, 32, kCausal, 2, 1, Layout::kAlign8},
      {10, 40, 32, kFull, 2, 1, Layout::kAlign4},
      {10, 40, 33, kCausal, 2, 1, Layout::kAlign2},
      {20, 50, 32, kCausal, 2, 2, Layout::kPacked, 0, 2, false},
      {20, 50, 32, kTopLeft, 2, 1, Layout::kBroadcast, 0, 2},
  };
  for (const Case& c : simt::feature_cases(40)) cases.push_back(c);
  for (const Case& c : score_cases(40)) cases.push_back(c);
  for (const Case& c : score_cases(128)) cases.push_back(c);
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  simt::Tests tests("wmma_general", argc > 1 ? argv[1] : "");
  for (const Case& c : cases()) {
    tests.run<half>(Kernel::kWmma, c, run_kernel<half>, "general");
    tests.run<__nv_bfloat16>(Kernel::kWmma, c, run_kernel<__nv_bfloat16>, "general");
  }
  return tests.finish();
}
