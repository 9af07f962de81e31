#pragma once

#include "harness/block.h"

namespace dlattn::ptx {

constexpr bool kStartsEarly = true;

inline void wait_for_grids_ahead() {
  simt::wait_for_grids_ahead();
}

inline void let_next_grid_start() {
  simt::let_next_grid_start();
}

// Every thread must wait before it ends: the harness sees to that.
inline void let_next_grid_start_before_wait() {}

}  // namespace dlattn::ptx
