#define DLATTN_CPU_ISA portable
#include "cpu/forward/kernel_set.h"

namespace dlattn::cpu {

const KernelSet& portable_kernels() {
  return portable::kKernels;
}

}  // namespace dlattn::cpu
