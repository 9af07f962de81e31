#define DLATTN_CPU_ISA avx512
#include "cpu/forward/kernel_set.h"

namespace dlattn::cpu {

const KernelSet& avx512_kernels() {
  return avx512::kKernels;
}

}  // namespace dlattn::cpu
