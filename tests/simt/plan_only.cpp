// plan.cpp asks the CPU backend for CPU plans; these tests make GPU plans alone and link no
// backend.
#include <cstdlib>

#include "core/backend.h"

namespace dlattn::cuda {

bool compiled() {
  return false;
}
const char* archs() {
  return "";
}

}  // namespace dlattn::cuda

namespace dlattn::cpu {

void plan(const AttentionParams&, const DeviceInfo&, const Options&, Plan*) {
  std::abort();
}

}  // namespace dlattn::cpu
