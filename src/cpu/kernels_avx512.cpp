#define DLATTN_CPU_ISA avx512
#include "cpu/backward/kernel_set.h"
#include "cpu/forward/kernel_set.h"

namespace dlattn::cpu {

const KernelSet& avx512_kernels() {
  return avx512::kKernels;
}

const BackwardKernels& avx512_backward_kernels(bool is_double) {
  return avx512::backward_kernels(is_double);
}

}  // namespace dlattn::cpu
