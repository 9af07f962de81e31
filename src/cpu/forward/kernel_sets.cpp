#include <cstring>
#include <string>

#include "core/backend.h"
#include "cpu/device.h"
#include "cpu/forward/task.h"

namespace dlattn::cpu {

const KernelSet& kernels_for(const char* isa) {
  const struct {
    const char* isa;
    const KernelSet& (*kernels)();
  } sets[] = {
#if defined(__x86_64__)
      {"avx512", avx512_kernels},
      {"avx2", avx2_kernels},
#endif
      {"portable", portable_kernels},
  };
  if (!*isa) isa = device_info().isa;  // a DeviceInfo as it is at first: this processor
  for (const auto& set : sets) {
    if (std::strcmp(isa, set.isa) == 0 && has_isa(isa)) return set.kernels();
  }
  throw UnsupportedError(std::string("isa is \"") + isa +
                         "\", which this processor or this build does not have");
}

}  // namespace dlattn::cpu
