#pragma once

#include <cstdint>

#include "harness/block.h"

namespace dlattn::ptx {

inline unsigned char* dynamic_smem() {
  return simt::dynamic_smem();
}

using SmemAddress = std::uint32_t;

using simt::kSmemBase;

inline SmemAddress smem_address(const void* smem) {
  return kSmemBase +
         static_cast<SmemAddress>(static_cast<const unsigned char*>(smem) - simt::dynamic_smem());
}

inline unsigned char* at_smem_address(SmemAddress address) {
  return simt::dynamic_smem() + static_cast<std::int64_t>(address) - kSmemBase;
}

}  // namespace dlattn::ptx
