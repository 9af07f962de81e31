#pragma once

#include <cstdint>

#include "cuda/ptx/elements.cuh"

namespace dlattn::ptx {

// PTX ISA, "Floating Point Instructions: ex2". 2^x with a relative error below 2^-22. 2^-inf = 0,
// 2^inf = inf, NaN stays NaN; subnormal inputs and results are flushed to zero.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA, "Floating Point Instructions: lg2". log2 of a normal x > 0, with an error of at most
// 2^-22.6 of itself, or where x is between 0.5 and 2 of 1.
__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA, "Floating Point Instructions: max", .NaN. The larger one, or NaN if either is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// PTX ISA, "Half Precision Floating Point Instructions: sub". x - y of two pairs of fp16 in a
// register each.
__device__ __forceinline__ std::uint32_t subtract_halves(std::uint32_t x, std::uint32_t y) {
  std::uint32_t z;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// PTX ISA, "Half Precision Floating Point Instructions: abs" and "max". The larger magnitudes of
// two pairs of T, each in a register; the number's if the other one is NaN.
template <typename T>
__device__ __forceinline__ std::uint32_t max_magnitudes(std::uint32_t x, std::uint32_t y);
template <>
__device__ __forceinline__ std::uint32_t max_magnitudes<half>(std::uint32_t x, std::uint32_t y) {
  std::uint32_t z;
  asm("{ .reg .b32 a, b;\n"
      "abs.f16x2 a, %1;\n"
      "abs.f16x2 b, %2;\n"
      "max.f16x2 %0, a, b; }"
      : "=r"(z)
      : "r"(x), "r"(y));
  return z;
}
template <>
__device__ __forceinline__ std::uint32_t max_magnitudes<__nv_bfloat16>(std::uint32_t x,
                                                                       std::uint32_t y) {
  std::uint32_t z;
  asm("{ .reg .b32 a, b;\n"
      "abs.bf16x2 a, %1;\n"
      "abs.bf16x2 b, %2;\n"
      "max.bf16x2 %0, a, b; }"
      : "=r"(z)
      : "r"(x), "r"(y));
  return z;
}

}  // namespace dlattn::ptx
