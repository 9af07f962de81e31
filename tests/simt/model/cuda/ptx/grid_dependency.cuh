#pragma once

#include "harness/block.h"

namespace dlattn::ptx {

inline void wait_for_grids_ahead() {
  simt::wait_for_grids_ahead();
}

inline void let_next_grid_start() {
  simt::let_next_grid_start();
}

// What must hold is that every thread waits before it ends, which the harness sees to.
inline void let_next_grid_start_before_wait() {}

}  // namespace dlattn::ptx
