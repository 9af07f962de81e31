#pragma once

#include "harness/block.h"

namespace dlattn::ptx {

template <int kRegisters>
void raise_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "");
  simt::set_max_registers(kRegisters, true);
}

template <int kRegisters>
void lower_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "");
  simt::set_max_registers(kRegisters, false);
}

}  // namespace dlattn::ptx
