#pragma once

#include "harness/block.h"

namespace dlattn::ptx {

inline void barrier_sync(int id, int num_threads) {
  simt::sync_barrier(id, num_threads);
}

inline void barrier_arrive(int id, int num_threads) {
  simt::arrive_at_barrier(id, num_threads);
}

}  // namespace dlattn::ptx
