#define DLATTN_CPU_ISA avx2
#include "cpu/forward/kernel_set.h"

namespace dlattn::cpu {

const KernelSet& avx2_kernels() {
  return avx2::kKernels;
}

}  // namespace dlattn::cpu
