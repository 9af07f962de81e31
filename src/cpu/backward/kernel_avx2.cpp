#define DLATTN_CPU_ISA avx2
#include "cpu/backward/kernel_set.h"

namespace dlattn::cpu {

const BackwardKernels& avx2_backward_kernels(bool is_double) {
  return avx2::backward_kernels(is_double);
}

}  // namespace dlattn::cpu
