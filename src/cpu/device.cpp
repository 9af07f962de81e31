#include <cstdlib>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

#include "core/backend.h"

namespace dlattn::cpu {
namespace {

int cores_of_process() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count > 0 ? static_cast<int>(count) : 1;
}

int default_num_threads() {
  const char* value = std::getenv("DLATTN_NUM_THREADS");
  if (!value || !*value) return cores_of_process();
  char* end = nullptr;
  const long count = std::strtol(value, &end, 10);
  if (*end != '\0' || count < 1 || count > 4096) {
    throw UnsupportedError(std::string("DLATTN_NUM_THREADS is \"") + value + "\"; accepted: 1 to 4096");
  }
  return static_cast<int>(count);
}

}  // namespace

DeviceInfo device_info() {
  DeviceInfo info;
  info.name = "CPU";
  info.num_threads = default_num_threads();
  info.isa = "portable";
  return info;
}

}  // namespace dlattn::cpu
