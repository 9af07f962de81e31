#pragma once

#include "cuda/ptx/smem.cuh"
#include "harness/async_copy.h"

namespace dlattn::ptx {

template <int kBytes, bool kBypassL1 = kBytes == 16>
void cp_async(void* smem, const void* gmem, bool valid) {
  static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4, "cp.async copies 16, 8 or 4 bytes");
  simt::issue_async_copy(smem, gmem, kBytes, valid);
}

template <int kBytes, bool kBypassL1 = kBytes == 16>
void cp_async(SmemAddress smem, const void* gmem, bool valid) {
  cp_async<kBytes, kBypassL1>(at_smem_address(smem), gmem, valid);
}

inline void prefetch_to_l2(const void*) {}

inline void cp_async_commit() {
  simt::commit_async_copies();
}

template <int kPending>
void cp_async_wait() {
  simt::wait_async_copies(kPending);
}

}  // namespace dlattn::ptx
