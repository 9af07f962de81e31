#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/smem.cuh"
#include "harness/bulk_copy.h"
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

// Complete at once. Whoever reads it without waiting at the mbarrier races.
inline void store_at_block(SmemAddress own, const std::uint32_t (&x)[4], SmemAddress own_mbarrier,
                           unsigned rank) {
  if (own % sizeof x != 0) simt::die("st.async of %zu bytes to %u", sizeof x, own);
  unsigned char* const there = simt::smem_of_block(at_smem_address(own), rank);
  unsigned char* const mbarrier = simt::smem_of_block(at_smem_address(own_mbarrier), rank);
  simt::overwrite(there, x, sizeof x, 0);
  simt::touch(mbarrier, 8);
  simt::mbarrier_release(mbarrier);
  simt::mbarrier_start_bytes(mbarrier, sizeof x);
  simt::mbarrier_complete_bytes(mbarrier);
}

inline void copy_to_block(SmemAddress own, SmemAddress src, int bytes, SmemAddress own_mbarrier,
                          unsigned rank) {
  simt::issue_block_copy(simt::smem_of_block(at_smem_address(own), rank), at_smem_address(src),
                         bytes, simt::smem_of_block(at_smem_address(own_mbarrier), rank), rank);
}

}  // namespace dlattn::ptx
