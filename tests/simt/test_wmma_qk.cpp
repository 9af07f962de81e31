#include "attention_test.h"
#include "cuda/wmma_qk/kernel.cuh"
#include "wmma_cases.h"

namespace {

using dlattn::DType;
using dlattn::Kernel;

// The instance of instances.cmake that a plan names.
template <typename T>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
#define DLATTN_INSTANCE(family, dtype, tile)                                                    \
  if constexpr (Kernel::family == Kernel::kWmmaQk && DType::dtype == simt::DTypeOf<T>::value) { \
    if (head_dim_tile == tile) return dlattn::wmma_qk::kernel<T, tile>(params, shape);          \
  }
#include "instances.inc"
#undef DLATTN_INSTANCE
  simt::die("no instance for head_dim_tile %d", head_dim_tile);
}

}  // namespace

int main(int argc, char** argv) {
  simt::Tests tests("wmma_qk", argc > 1 ? argv[1] : "");
  for (const simt::Case& c : simt::wmma_cases(simt::kThreadSanitizer)) {
    tests.run<half>(Kernel::kWmmaQk, c, run_kernel<half>);
    tests.run<__nv_bfloat16>(Kernel::kWmmaQk, c, run_kernel<__nv_bfloat16>);
  }
  return tests.finish();
}
