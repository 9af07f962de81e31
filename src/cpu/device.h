#pragma once

#include <cstdint>

namespace dlattn::cpu {

// Whether this processor and this build have an instruction set, one that device_info() may name.
bool has_isa(const char* isa);

// Throws UnsupportedError for a number of threads that Options may not have.
void check_num_threads(int num_threads);

// Bytes of this machine's memory; where that is not known, more than any has.
std::int64_t machine_memory();

}  // namespace dlattn::cpu
