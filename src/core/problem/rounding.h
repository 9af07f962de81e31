#pragma once

#include <cstdint>
#include <cstring>

#include "core/util/inline.h"

// How numbers become 8-bit ones: the one definition of it, for the CPU backend, kernels and their
// tests. A stored number times its scale is what it stands for.
namespace dlattn {

// q and k are rotated before they are rounded: times a sign of the column's, then a Hadamard
// transform of all columns, divided by their number. Products of two rotated rows are those of the
// rows, divided by the number of columns. Each column is then spread over all of them. The
// transform is computed in place, over pairs of columns 1, 2, 4, ... apart, in this order, so that
// all who compute it have the same bits.
//
// The sign of a column: fixed, and alike no row of the transform.
DLATTN_SHARED constexpr bool rotation_negates(int column) {
  std::uint32_t x = static_cast<std::uint32_t>(column) * 0x9e3779b9u;
  x = (x ^ x >> 15) * 0x85ebca6bu;
  return x >> 31;
}

DLATTN_SHARED std::uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}
DLATTN_SHARED float float_of_bits(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// The bits of a magnitude, whose order is that of numbers, infinity and NaN last: the largest
// decides the scale of a block.
DLATTN_SHARED std::uint32_t magnitude_bits(float x) {
  return bits_of(x) & 0x7fffffffu;
}
constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// A number x is stored as the rounded (x * up) * inverse, and counts times `scale`. Two factors, as
// 1 / scale may be beyond float.
struct Rounding {
  float scale;
  float up;
  float inverse;
};

// To integers of -127 to 127. A number that is not finite makes all that share its scale NaN.
DLATTN_SHARED Rounding rounding_to_int8(std::uint32_t largest_bits) {
  const float largest = float_of_bits(largest_bits);
  if (largest_bits >= kInfinityBits) return {float_of_bits(0x7fc00000u), 0.0f, 0.0f};
  if (largest_bits == 0) return {0.0f, 0.0f, 0.0f};
  const float up = largest < 0x1p-60f ? 0x1p64f : 1.0f;
  return {largest / 127.0f, up, 127.0f / (largest * up)};
}

// To e4m3 or fp16, by a power of two: the largest is at most `limit`, from 4 to 2^15, and more than
// half of it. Below 4 a scale's inverse would not be a normal number.
constexpr float kLargestE4m3 = 448.0f;
DLATTN_SHARED Rounding rounding_by_power(std::uint32_t largest_bits, float limit = kLargestE4m3) {
  constexpr std::uint32_t kFraction = 0x7fffffu;
  const std::uint32_t limit_bits = bits_of(limit), power = (limit_bits >> 23) - 127;
  // A larger fraction than the limit's takes the next power.
  const std::uint32_t exponent = (largest_bits + (kFraction - (limit_bits & kFraction))) >> 23;
  const std::uint32_t scale = exponent > power + 1 ? exponent - power : 1;
  return {float_of_bits(scale << 23), 1.0f, float_of_bits((254 - scale) << 23)};
}

}  // namespace dlattn
