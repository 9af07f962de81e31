#pragma once

#include "harness/block.h"

namespace dlattn::ptx {

inline unsigned take_ticket(unsigned* counter) {
  simt::check_global_access();
  return __atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED);
}

inline void raise_counter(unsigned* counter, unsigned x) {
  simt::check_global_access();
  unsigned now = __atomic_load_n(counter, __ATOMIC_RELAXED);
  do {
    if (now >= x) return;
  } while (
      !__atomic_compare_exchange_n(counter, &now, x, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

// Blocks run one after another, or those of a cluster at once: a counter that nobody raises any
// more is a deadlock, which the scheduler finds.
inline void wait_for_counter(const unsigned* counter, unsigned x) {
  simt::check_global_access();
  simt::wait_for_counter(counter, x);
  __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

inline void raise_counter_by(unsigned* counter, unsigned x) {
  simt::check_global_access();
  __atomic_fetch_add(counter, x, __ATOMIC_RELEASE);
}

}  // namespace dlattn::ptx
