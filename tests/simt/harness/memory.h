#pragma once

#include <cstdint>
#include <cstring>

// Accesses that the sanitizers see.
namespace simt {

// Shows a read.
inline void touch(const void* memory, unsigned bytes) {
  const volatile unsigned char* byte = static_cast<const unsigned char*>(memory);
  for (unsigned i = 0; i < bytes; ++i) (void)byte[i];
}

// A write. The sanitizers do not see a call of memset or memcpy with a constant size that the
// compiler expands itself.
inline void overwrite(void* dst, const void* src, unsigned bytes, std::uint32_t otherwise) {
  volatile std::uint32_t* to = static_cast<std::uint32_t*>(dst);
  for (unsigned i = 0; i < bytes / 4; ++i) {
    std::uint32_t word = otherwise;
    if (src) std::memcpy(&word, static_cast<const unsigned char*>(src) + 4 * i, 4);
    to[i] = word;
  }
}

// A number that changes with the 16 bytes at `memory`, which are read.
inline std::uint64_t checksum(const void* memory) {
  const volatile std::uint64_t* words = static_cast<const std::uint64_t*>(memory);
  return words[0] * 0x9E3779B97F4A7C15ull ^ (words[1] + 0x7F4A7C15ull) * 0xC2B2AE3D27D4EB4Full;
}

}  // namespace simt
