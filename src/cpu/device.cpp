#include "cpu/device.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include "core/backend.h"

namespace dlattn::cpu {
namespace {

constexpr int kMostThreads = 4096;

struct Isa {
  const char* name;
  bool (*available)();
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") != 0;
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
         __builtin_cpu_supports("f16c") != 0;
}
#endif

// Best first.
constexpr Isa kIsas[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512},
    {"avx2", has_avx2},
#endif
    {"portable", [] { return true; }},
};

// The name in DLATTN_CPU_ISA, else the best that this processor has.
const char* choose_isa() {
  const char* wanted = std::getenv("DLATTN_CPU_ISA");
  std::string accepted;
  for (const Isa& isa : kIsas) {
    if (!isa.available()) continue;
    if (!wanted || !*wanted || std::strcmp(wanted, isa.name) == 0) return isa.name;
    accepted += (accepted.empty() ? "" : ", ") + std::string(isa.name);
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

// The first number of OMP_NUM_THREADS, by which users, and launchers that start a process for each
// device, limit the threads of all libraries; else `cores`. What is no number is OpenMP's to
// refuse.
int threads_of_openmp(int cores) {
  const char* value = std::getenv("OMP_NUM_THREADS");
  if (!value) return cores;
  char* end = nullptr;
  const long count = std::strtol(value, &end, 10);
  const bool is_number = end != value && (*end == '\0' || *end == ',' || *end == ' ');
  return is_number && count >= 1 && count <= kMostThreads ? static_cast<int>(count) : cores;
}

int default_num_threads() {
  const char* value = std::getenv("DLATTN_NUM_THREADS");
  if (!value || !*value) return threads_of_openmp(cores_of_process());
  char* end = nullptr;
  const long count = std::strtol(value, &end, 10);
  if (*end != '\0' || count < 1 || count > kMostThreads) {
    throw UnsupportedError(std::string("DLATTN_NUM_THREADS is \"") + value + "\"; accepted: 1 to " +
                           std::to_string(kMostThreads));
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

bool has_isa(const char* isa) {
  for (const Isa& known : kIsas) {
    if (std::strcmp(isa, known.name) == 0) return known.available();
  }
  return false;
}

void check_num_threads(int num_threads) {
  if (num_threads >= 0 && num_threads <= kMostThreads) return;
  throw UnsupportedError("num_threads is " + std::to_string(num_threads) + "; accepted: 1 to " +
                         std::to_string(kMostThreads) + ", or 0 for the default");
}

std::int64_t machine_memory() {
#if defined(_SC_PHYS_PAGES)
  const std::int64_t pages = sysconf(_SC_PHYS_PAGES), bytes = sysconf(_SC_PAGESIZE);
  if (pages > 0 && bytes > 0) return pages * bytes;
#endif
  return std::int64_t{1} << 48;
}

}  // namespace dlattn::cpu
