#define DLATTN_CPU_ISA portable
#include "cpu/backward/kernel_set.h"
#include "cpu/forward/kernel_set.h"

namespace dlattn::cpu {

const KernelSet& portable_kernels() {
  return portable::kKernels;
}

const BackwardKernels& portable_backward_kernels(bool is_double) {
  return portable::backward_kernels(is_double);
}

}  // namespace dlattn::cpu
