#pragma once

#include <cstring>

#include "cuda/ptx/smem.cuh"
#include "harness/memory.h"

namespace dlattn::ptx {

constexpr bool kClusters = true;

inline void cluster_sync() {
  simt::sync_cluster();
}

inline void cluster_leave() {
  simt::sync_cluster();
}

template <int kCount>
void load_of_block(float (&x)[kCount], SmemAddress own, unsigned rank) {
  if (own % sizeof x != 0) simt::die("ld.shared::cluster of %zu bytes from %u", sizeof x, own);
  const unsigned char* const there = simt::smem_of_block(at_smem_address(own), rank);
  simt::touch(there, sizeof x);
  std::memcpy(x, there, sizeof x);
}

inline void mbarrier_arrive_at_block(SmemAddress own, unsigned rank) {
  unsigned char* const there = simt::smem_of_block(at_smem_address(own), rank);
  simt::touch(there, 8);
  simt::mbarrier_arrive(there);
}

}  // namespace dlattn::ptx
