// core asks the CPU backend for CPU plans; these tests make GPU plans alone and link no backend.
#include <cstdlib>

#include "core/backend.h"

namespace dlattn::cpu {

void plan(const AttentionParams&, const DeviceInfo&, const Options&, Plan*) {
  std::abort();
}

void plan(const BackwardParams&, const DeviceInfo&, const Options&, Plan*) {
  std::abort();
}

}  // namespace dlattn::cpu
