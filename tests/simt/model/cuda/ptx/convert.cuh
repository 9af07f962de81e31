#pragma once

#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>

namespace dlattn::ptx {

inline std::uint32_t convert_e4m3x4(float x0, float x1, float x2, float x3) {
  const float numbers[4] = {x0, x1, x2, x3};
  std::uint32_t packed = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t byte = __nv_cvt_float_to_fp8(numbers[i], __NV_SATFINITE, __NV_E4M3);
    packed |= byte << 8 * i;
  }
  return packed;
}

inline std::uint32_t convert_s8x4(float x0, float x1, float x2, float x3) {
  const float numbers[4] = {x0, x1, x2, x3};
  std::uint32_t packed = 0;
  for (int i = 0; i < 4; ++i) {
    const float nearest = std::nearbyint(std::fmin(std::fmax(numbers[i], -128.0f), 127.0f));
    const int integer = std::isnan(numbers[i]) ? 0 : static_cast<int>(nearest);
    packed |= (static_cast<std::uint32_t>(integer) & 0xffu) << 8 * i;
  }
  return packed;
}

inline void convert_e4m3x4_to_half(std::uint32_t packed, std::uint32_t* low, std::uint32_t* high) {
  std::uint32_t halves[4];
  for (int i = 0; i < 4; ++i) {
    const auto byte = static_cast<__nv_fp8_storage_t>(packed >> 8 * i);
    halves[i] = __nv_cvt_fp8_to_halfraw(byte, __NV_E4M3).x;
  }
  *low = halves[1] << 16 | halves[0];
  *high = halves[3] << 16 | halves[2];
}

}  // namespace dlattn::ptx
