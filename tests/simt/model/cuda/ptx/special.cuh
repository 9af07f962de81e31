#pragma once

#include "harness/block.h"

namespace dlattn::ptx {

inline unsigned reread_block_index() {
  return simt::this_thread().block_idx.x;
}

inline unsigned reread_thread_index() {
  return simt::this_thread().thread_idx.x;
}

inline unsigned reread(unsigned x) {
  return x;
}
inline float reread(float x) {
  return x;
}

inline void fence_loads() {}

}  // namespace dlattn::ptx
