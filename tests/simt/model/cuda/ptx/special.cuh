#pragma once

#include "harness/block.h"

namespace dlattn::ptx {

inline unsigned reread_block_index() {
  return simt::this_thread().block_idx.x;
}

}  // namespace dlattn::ptx
