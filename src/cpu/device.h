#pragma once

#include <cstdint>

#include "cpu/task.h"

namespace dlattn::cpu {

// The kernels of an instruction set that device_info() may name.
const KernelSet& kernels_for(const char* isa);

}  // namespace dlattn::cpu
