#pragma once

#include <cstdint>

#include "cuda/ptx/permute.cuh"

namespace dlattn::ptx {

// PTX ISA, "Data Movement and Conversion Instructions: cvt". Four numbers to e4m3, the first one in
// the lowest byte: to nearest even, what is beyond 448 to 448 of its sign, NaN to NaN.
__device__ __forceinline__ std::uint32_t convert_e4m3x4(float x0, float x1, float x2, float x3) {
  std::uint32_t packed;
  asm("{ .reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high}; }"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}

// The same section, and "cvt.pack". Four numbers to signed bytes, the first one in the lowest byte:
// to the nearest integer, of two the even one, at least -128 and at most 127; NaN to 0.
__device__ __forceinline__ std::uint32_t convert_s8x4(float x0, float x1, float x2, float x3) {
  std::uint32_t packed;
  asm("{ .reg .s32 i0, i1, i2, i3;\n"
      ".reg .b32 high;\n"
      "cvt.rni.s32.f32 i0, %1;\n"
      "cvt.rni.s32.f32 i1, %2;\n"
      "cvt.rni.s32.f32 i2, %3;\n"
      "cvt.rni.s32.f32 i3, %4;\n"
      "cvt.pack.sat.s8.s32.b32 high, i3, i2, 0;\n"
      "cvt.pack.sat.s8.s32.b32 %0, i1, i0, high; }"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}

// A pair of e4m3, in the high bytes of two halves of 16 bits, to fp16 without cvt: fraction and
// exponent to their places, whose bias is 8 more, and NaN's exponent to all ones.
__device__ __forceinline__ std::uint32_t widen_e4m3x2(std::uint32_t high_bytes) {
  const std::uint32_t magnitude = (high_bytes & 0x7f007f00u) >> 1;
  const std::uint32_t nan = (magnitude + 0x00800080u) & 0x40004000u;
  std::uint32_t number;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(number) : "r"(magnitude), "r"(0x5c005c00u));  // by 256
  return number | (high_bytes & 0x80008000u) | nan | (nan - (nan >> 4));
}

// The reverse of e4m3x4, exactly, to pairs of fp16: the first two numbers and the other two.
__device__ __forceinline__ void convert_e4m3x4_to_half(std::uint32_t packed, std::uint32_t* low,
                                                       std::uint32_t* high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  *low = widen_e4m3x2(permute_bytes<0x1404>(packed, 0));
  *high = widen_e4m3x2(permute_bytes<0x3424>(packed, 0));
#else
  asm("{ .reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second; }"
      : "=r"(*low), "=r"(*high)
      : "r"(packed));
#endif
}

}  // namespace dlattn::ptx
