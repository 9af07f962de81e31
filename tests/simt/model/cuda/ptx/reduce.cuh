#pragma once

#include <cstdint>
#include <cstring>

#include "harness/block.h"

namespace dlattn::ptx {

// Atomic, as ThreadSanitizer sees it: additions of several threads are no race, others' plain
// accesses beside them are.
inline void reduce_add(float* to, float x) {
  simt::check_global_access();
  auto* bits = reinterpret_cast<std::uint32_t*>(to);
  std::uint32_t before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
  do {
    float sum;
    std::memcpy(&sum, &before, sizeof sum);
    sum += x;
    std::memcpy(&after, &sum, sizeof after);
  } while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
}

}  // namespace dlattn::ptx
