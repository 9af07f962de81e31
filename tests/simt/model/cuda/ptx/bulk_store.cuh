#pragma once

#include "cuda/ptx/smem.cuh"
#include "harness/bulk_copy.h"

namespace dlattn::ptx {

inline void bulk_store(float* to, SmemAddress src, int bytes) {
  simt::issue_bulk_write(to, at_smem_address(src), bytes, simt::BulkWrite::kStore);
}

inline void tma_store_wait() {
  simt::wait_bulk_stores(0);
  simt::wait_bulk_writes(0);
}

// Global memory has no view of its own for the async proxy here.
inline void fence_proxy_async_global() {}

}  // namespace dlattn::ptx
