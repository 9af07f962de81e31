#include <cstring>
#include <string>

#include "core/backend.h"
#include "cpu/backward/task.h"
#include "cpu/device.h"
#include "cpu/forward/task.h"

namespace dlattn::cpu {
namespace {

struct Kernels {
  const char* isa;
  const KernelSet& (*forward)();
  const BackwardKernels& (*backward)(bool is_double);
};

const Kernels& kernels_of(const char* isa) {
  static constexpr Kernels kAll[] = {
#if defined(__x86_64__)
      {"avx512", avx512_kernels, avx512_backward_kernels},
      {"avx2", avx2_kernels, avx2_backward_kernels},
#endif
      {"portable", portable_kernels, portable_backward_kernels},
  };
  if (!*isa) isa = device_info().isa;  // a DeviceInfo as it is at first: this processor
  for (const Kernels& kernels : kAll) {
    if (std::strcmp(isa, kernels.isa) == 0 && has_isa(isa)) return kernels;
  }
  throw UnsupportedError(std::string("isa is \"") + isa +
                         "\", which this processor or this build does not have");
}

}  // namespace

const KernelSet& kernels_for(const char* isa) {
  return kernels_of(isa).forward();
}

const BackwardKernels& backward_kernels_for(const char* isa, DType dtype) {
  return kernels_of(isa).backward(dtype == DType::kFloat64);
}

}  // namespace dlattn::cpu
