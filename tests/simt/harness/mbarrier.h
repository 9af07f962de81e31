#pragma once

#include "async_copy.h"
#include "bulk_copy.h"
#include "memory.h"

namespace simt {

// Asynchronous copies are completed at the last moment at which they may be: when somebody waits
// for them.
inline void wait_at_mbarrier(void* mbarrier, int parity) {
  touch(mbarrier, 8);
  if (!mbarrier_wait(mbarrier, parity)) return;
  complete_bulk_loads(mbarrier);
  complete_promised_copies(mbarrier);
  mbarrier_acquire(mbarrier, parity);
}

}  // namespace simt
