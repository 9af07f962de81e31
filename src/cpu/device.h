#pragma once

namespace dlattn::cpu {

// Whether this processor and this build have an instruction set, one that device_info() may name.
bool has_isa(const char* isa);

}  // namespace dlattn::cpu
