#pragma once

#include <cstdint>
#include <cstring>

// 16-bit floating-point numbers as floats, from their bits.
namespace simt {

inline float from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float from_bfloat16(std::uint16_t bits) {
  return from_bits(std::uint32_t{bits} << 16);
}

// Without branches: the compiler makes vectors of loops over it.
inline float from_half(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits} >> 15 << 31, rest = bits & 0x7FFFu;
  const float magnitude = from_bits(rest << 13) * 0x1p112f;  // the exponents' biases differ
  std::uint32_t magnitude_bits;
  std::memcpy(&magnitude_bits, &magnitude, sizeof magnitude);
  const std::uint32_t special = 0x7F800000u | rest << 13;
  return from_bits(sign | (rest >= 0x7C00u ? special : magnitude_bits));
}

}  // namespace simt
