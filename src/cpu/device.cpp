#include "cpu/device.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

#include "core/backend.h"

namespace dlattn::cpu {
namespace {

// Best first.
struct Isa {
  const char* name;
  bool available;
  const KernelSet& (*kernels)();
};

const Isa* isas(int* count) {
  static const Isa table[] = {
#if defined(__x86_64__)
      {"avx512", __builtin_cpu_supports("avx512f") != 0, avx512_kernels},
      {"avx2",
       __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
           __builtin_cpu_supports("f16c") != 0,
       avx2_kernels},
#endif
      {"portable", true, portable_kernels},
  };
  *count = static_cast<int>(sizeof(table) / sizeof(table[0]));
  return table;
}

// The name in DLATTN_CPU_ISA, else the best that this processor has.
const char* choose_isa() {
  int count = 0;
  const Isa* table = isas(&count);
  const char* wanted = std::getenv("DLATTN_CPU_ISA");
  std::string accepted;
  for (int i = 0; i < count; ++i) {
    if (!table[i].available) continue;
    if (!wanted || !*wanted || std::strcmp(wanted, table[i].name) == 0) return table[i].name;
    accepted += (accepted.empty() ? "" : ", ") + std::string(table[i].name);
  }
  throw UnsupportedError(std::string("DLATTN_CPU_ISA is \"") + wanted +
                         "\"; accepted on this processor: " + accepted);
}

// Respects CPU affinity, as set by taskset, a job scheduler or a container.
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
    throw UnsupportedError(std::string("DLATTN_NUM_THREADS is \"") + value +
                           "\"; accepted: 1 to 4096");
  }
  return static_cast<int>(count);
}

}  // namespace

DeviceInfo device_info() {
  DeviceInfo info;
  info.name = "CPU";
  info.num_threads = default_num_threads();
  info.isa = choose_isa();
  return info;
}

const KernelSet& kernels_for(const char* isa) {
  int count = 0;
  const Isa* table = isas(&count);
  for (int i = 0; i < count; ++i) {
    if (table[i].available && std::strcmp(isa, table[i].name) == 0) return table[i].kernels();
  }
  throw UnsupportedError(std::string("isa is \"") + isa +
                         "\", which this processor or this build does not have");
}

}  // namespace dlattn::cpu
