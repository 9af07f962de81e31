#define DLATTN_CPU_ISA avx2
#include "cpu/backward/kernel_set.h"
#include "cpu/forward/kernel_set.h"

namespace dlattn::cpu {

const KernelSet& avx2_kernels() {
  return avx2::kKernels;
}

const BackwardKernels& avx2_backward_kernels(bool is_double) {
  return avx2::backward_kernels(is_double);
}

}  // namespace dlattn::cpu
