#pragma once

#include <cstdint>
#include <cstring>

#include "harness/block.h"

namespace dlattn::ptx {

struct Float4 {
  float x[4];
};

// Atomic, as ThreadSanitizer sees it: additions of several threads are no race, others' plain
// accesses beside them are.
inline void reduce_add(float* to, const Float4& numbers) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0)
    simt::die("red.v4 at %p, which is not a multiple of 16", static_cast<void*>(to));
  simt::check_global_access();
  for (int i = 0; i < 4; ++i) {
    auto* bits = reinterpret_cast<std::uint32_t*>(to + i);
    std::uint32_t before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
    do {
      float sum;
      std::memcpy(&sum, &before, sizeof sum);
      sum += numbers.x[i];
      std::memcpy(&after, &sum, sizeof after);
    } while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
  }
}

// Not atomic: whoever adds at the same time is a race.
inline void reduce_add_alone(float* to, const Float4& numbers) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0)
    simt::die("red.v4 at %p, which is not a multiple of 16", static_cast<void*>(to));
  simt::check_global_access();
  for (int i = 0; i < 4; ++i) to[i] += numbers.x[i];
}

}  // namespace dlattn::ptx
