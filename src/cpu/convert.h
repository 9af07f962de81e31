#pragma once

#include <cstdint>
#include <cstring>

// Scalar conversions of the 16-bit types and from the 8-bit ones, rounding to nearest even.
// Internal linkage on purpose: this header is compiled with different instruction sets, and the
// linker must not pick one copy for all.
namespace dlattn::cpu {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};
struct Float8 {  // e4m3fn
  std::uint8_t bits;
};
struct Int8 {
  std::int8_t value;
};

static inline std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float float_from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

static inline float to_float(BFloat16 value) {
  return float_from_bits(static_cast<std::uint32_t>(value.bits) << 16);
}

static inline float to_float(Half value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u)
    return float_from_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Exponent bias 15 to 127 by an exact multiplication, which also normalises subnormals.
  const float scaled = float_from_bits(magnitude << 13) * 0x1p112f;
  return float_from_bits(sign | float_bits(scaled));
}

static inline float to_float(Float8 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x80u) << 24;
  const std::uint32_t magnitude = value.bits & 0x7fu;
  if (magnitude == 0x7fu) return float_from_bits(sign | 0x7fc00000u);
  // As of half: bias 7 to 127.
  const float scaled = float_from_bits(magnitude << 20) * 0x1p120f;
  return float_from_bits(sign | float_bits(scaled));
}

static inline float to_float(Int8 value) {
  return static_cast<float>(value.value);
}

static inline float to_float(float value) {
  return value;
}
static inline double to_float(double value) {
  return value;
}

static inline void from_float(float value, BFloat16* result) {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {  // NaN: rounding up could turn it into infinity
    result->bits = static_cast<std::uint16_t>((bits >> 16) | 0x40u);
    return;
  }
  result->bits = static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline void from_float(float value, Half* result) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 2^16 or more
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal in half precision
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    half = (rounded - 0x38000000u) >> 13;
  } else {
    // Adding 0.5 leaves the subnormal's bits, rounded, at the bottom of the fraction.
    half = float_bits(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  }
  result->bits = static_cast<std::uint16_t>(sign | half);
}

// Beyond 448, which is the largest of them, 448.
static inline void from_float(float value, Float8* result) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t byte;
  if (magnitude > 0x7f800000u) {
    byte = 0x7fu;
  } else if (magnitude >= 0x43e00000u) {
    byte = 0x7eu;
  } else if (magnitude >= 0x3c800000u) {  // 2^-6: normal
    const std::uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
    byte = (rounded - 0x3c000000u) >> 20;
  } else {
    // Subnormals are multiples of 2^-9, the last bit of 2^14 in fp32.
    byte = float_bits(float_from_bits(magnitude) + 0x1p14f) - 0x46800000u;
  }
  result->bits = static_cast<std::uint8_t>(sign | byte);
}

static inline void from_float(float value, float* result) {
  *result = value;
}
static inline void from_float(double value, double* result) {
  *result = value;
}

// The bits that order numbers by magnitude, infinity and NaN last; and those of 2^100, or of
// infinity where the type does not reach so far.
static inline std::uint16_t magnitude_bits(Half value) {
  return value.bits & 0x7fffu;
}
static inline std::uint16_t magnitude_bits(BFloat16 value) {
  return value.bits & 0x7fffu;
}
static inline std::uint32_t magnitude_bits(float value) {
  return float_bits(value) & 0x7fffffffu;
}
static inline std::uint64_t magnitude_bits(double value) {
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7fffffffffffffffu;
}
static inline std::uint16_t small_bits(Half) {
  return 0x7c00u;
}
static inline std::uint16_t small_bits(BFloat16) {
  return 0x7180u;
}
static inline std::uint32_t small_bits(float) {
  return 0x71800000u;
}
static inline std::uint64_t small_bits(double) {
  return 0x4630000000000000u;
}

}  // namespace dlattn::cpu
