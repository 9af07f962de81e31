#include "attention_test.h"
#include "cuda/forward/wmma_qk/kernel.cuh"
#include "length_cases.h"
#include "wmma_cases.h"

namespace {

constexpr std::string_view kFamily = "wmma_qk";

template <typename T>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  simt::with_instance<kFamily, T>(
      head_dim_tile, [&](auto tile) { dlattn::wmma_qk::kernel<T, tile>(params, shape); });
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::Tests tests("wmma_qk", arguments);
  std::vector<simt::Case> cases = simt::wmma_cases(simt::kThreadSanitizer);
  simt::append(&cases, simt::run_cases(96));
  for (const simt::Case& c : arguments.cases(cases)) {
    tests.run<half>(kFamily, c, run_kernel<half>);
    tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16>);
  }
  return tests.finish();
}
