#pragma once

#include "harness/bulk_copy.h"

namespace dlattn::ptx {

inline void cluster_sync_memory() {
  simt::sync_cluster();
}

inline void bulk_wait_written() {
  simt::wait_bulk_stores(0);
}

inline void fence_proxy_async_global() {}

}  // namespace dlattn::ptx
