#pragma once

#include <cstdint>

namespace dlattn::ptx {

template <int kSelector>
std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b) {
  static_assert((kSelector & ~0x7777) == 0, "a digit names one of eight bytes");
  const std::uint64_t both = std::uint64_t{b} << 32 | a;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const int from = kSelector >> 4 * i & 7;
    result |= static_cast<std::uint32_t>(both >> 8 * from & 0xFF) << 8 * i;
  }
  return result;
}

}  // namespace dlattn::ptx
