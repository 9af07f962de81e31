#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace dlattn::ptx {

// Subnormal results are flushed to zero as ex2.approx.ftz does.
inline float exp2(float x) {
  constexpr float kSmallestNormal = 1.17549435e-38f;
  const float y = std::exp2(x);
  return y < kSmallestNormal ? 0.0f : y;
}

inline float log2(float x) {
  return std::log2(x);
}

inline float max_or_nan(float x, float y) {
  return std::isnan(x) || std::isnan(y) ? NAN : std::fmax(x, y);
}

inline std::uint32_t subtract_halves(std::uint32_t x, std::uint32_t y) {
  std::uint32_t differences = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const __half_raw a{static_cast<unsigned short>(x >> shift)};
    const __half_raw b{static_cast<unsigned short>(y >> shift)};
    const float difference = __half2float(__half(a)) - __half2float(__half(b));
    differences |= std::uint32_t{__half_raw(__float2half_rn(difference)).x} << shift;
  }
  return differences;
}

template <typename T>
std::uint32_t max_magnitudes(std::uint32_t x, std::uint32_t y) {
  constexpr std::uint32_t kInfinity = std::is_same_v<T, half> ? 0x7C00 : 0x7F80, kNan = 0x7FFF;
  std::uint32_t larger = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const std::uint32_t a = x >> shift & 0x7FFF, b = y >> shift & 0x7FFF;
    const std::uint32_t of_numbers = a > kInfinity ? b : b > kInfinity ? a : a < b ? b : a;
    larger |= (of_numbers > kInfinity ? kNan : of_numbers) << shift;
  }
  return larger;
}

}  // namespace dlattn::ptx
