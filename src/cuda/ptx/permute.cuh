#pragma once

#include <cstdint>

namespace dlattn::ptx {

// PTX ISA, "Data Movement and Conversion Instructions: prmt". Byte i of the result is that byte of
// the eight of a (0 to 3) and b (4 to 7) which digit i of the selector names, the lowest first.
template <int kSelector>
__device__ __forceinline__ std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b) {
  static_assert((kSelector & ~0x7777) == 0, "a digit names one of eight bytes");
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "n"(kSelector));
  return result;
}

}  // namespace dlattn::ptx
