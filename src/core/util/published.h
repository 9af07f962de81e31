#pragma once

#include <atomic>
#include <memory>

namespace dlattn::core {

// The result of make(), kept at `place` from the first use on and never destroyed. Threads that
// come first at once all make it and agree on one of theirs. There is no lock for a caller to wait
// at, which a static's guard is too: one that is held while the process forks stays so in the
// child.
template <typename T, typename Make>
const T& published(std::atomic<const T*>& place, Make&& make) {
  if (const T* known = place.load(std::memory_order_acquire)) return *known;
  auto made = std::make_unique<const T>(make());
  const T* other = nullptr;
  if (place.compare_exchange_strong(other, made.get(), std::memory_order_acq_rel)) {
    return *made.release();
  }
  return *other;
}

}  // namespace dlattn::core
