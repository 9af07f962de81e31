#define DLATTN_CPU_ISA avx512
#include "cpu/kernel.h"

namespace dlattn::cpu {

const KernelSet& avx512_kernels() { return avx512::kKernels; }

}  // namespace dlattn::cpu
