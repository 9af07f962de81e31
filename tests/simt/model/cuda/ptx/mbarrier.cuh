#pragma once

#include <cstring>

#include "cuda/ptx/smem.cuh"
#include "harness/mbarrier.h"

namespace dlattn::ptx {

constexpr int kMbarrierBytes = 8;

inline void mbarrier_init(SmemAddress mbarrier, int count) {
  simt::mbarrier_init(at_smem_address(mbarrier), count);
  std::memset(at_smem_address(mbarrier), 0, kMbarrierBytes);  // a store that others must not race
}

inline void fence_mbarrier_init() {
  simt::fence_mbarrier_init();
}

inline void mbarrier_arrive(SmemAddress mbarrier) {
  simt::touch(at_smem_address(mbarrier), kMbarrierBytes);
  simt::mbarrier_arrive(at_smem_address(mbarrier));
}

inline void mbarrier_arrive_after_copies(SmemAddress mbarrier) {
  simt::promise_async_copies(at_smem_address(mbarrier));
}

inline void mbarrier_wait(SmemAddress mbarrier, int parity) {
  simt::wait_at_mbarrier(at_smem_address(mbarrier), parity);
}

inline void mbarrier_sleep(SmemAddress mbarrier, int parity) {
  mbarrier_wait(mbarrier, parity);
}

inline void mbarrier_arrive_expect_tx(SmemAddress mbarrier, int bytes) {
  simt::mbarrier_expect(at_smem_address(mbarrier), static_cast<std::uint32_t>(bytes));
  mbarrier_arrive(mbarrier);
}

}  // namespace dlattn::ptx
