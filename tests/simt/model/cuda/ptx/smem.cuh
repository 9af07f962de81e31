#pragma once

#include "harness/block.h"

namespace dlattn::ptx {

inline unsigned char* dynamic_smem() {
  return simt::dynamic_smem();
}

}  // namespace dlattn::ptx
