#pragma once

// CUDA's types of elements, by CUDA's own names, with the few conversions that kernels need of
// <cuda_fp16.h>, <cuda_bf16.h> and <cuda_fp8.h>: with those nvcc takes a CPU second more a file. A
// file that needs more of them, or <mma.h>, which includes them, includes them before this one.
#ifdef __CUDA_FP16_H__
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#else

#include <cstdint>
#include <cstring>

struct alignas(2) __half {
  std::uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(2) __nv_bfloat16 {
  std::uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __nv_fp8_e4m3 {
  std::uint8_t bits;
};
using half = __half;
using half2 = __half2;

__device__ __forceinline__ __half __ushort_as_half(std::uint16_t bits) {
  return {bits};
}
__device__ __forceinline__ std::uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) {
  return x.bits;
}

// PTX ISA, "Data Movement and Conversion Instructions: cvt", to nearest even.
__device__ __forceinline__ __half __float2half_rn(float x) {
  __half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
__device__ __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float x) {
  __nv_bfloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
__device__ __forceinline__ __half2 __floats2half2_rn(float x, float y) {
  std::uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(bits) : "f"(x), "f"(y));
  __half2 pair;
  memcpy(&pair, &bits, sizeof pair);
  return pair;
}
__device__ __forceinline__ __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  std::uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(bits) : "f"(x), "f"(y));
  __nv_bfloat162 pair;
  memcpy(&pair, &bits, sizeof pair);
  return pair;
}

// The same section, exact; bfloat16's bits are the high ones of a float's.
__device__ __forceinline__ float __half2float(__half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 x) {
  float y;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("cvt.f32.bf16 %0, %1;" : "=f"(y) : "h"(x.bits));
#else
  asm("mov.b32 %0, {0, %1};" : "=f"(y) : "h"(x.bits));
#endif
  return y;
}

#endif
