#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/elements.cuh"

namespace dlattn::tile {

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(half x) {
  return __half2float(x);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ half from_float<half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Packs two numbers as elements of T into a register, `low` in its low half.
template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack<half>(float low, float high) {
  const half2 pair = __floats2half2_rn(low, high);
  std::uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}
template <>
__device__ __forceinline__ std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  std::uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

// A vector of kCount elements, which one instruction loads or stores.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vec {
  static_assert(sizeof(T) * kCount <= 16, "an access moves at most 16 bytes");
  T x[kCount];
};

template <int kCount, typename T>
__device__ __forceinline__ void load(float (&to)[kCount], const T* from) {
  constexpr int kMax = 16 / static_cast<int>(sizeof(T));
  constexpr int kStep = kCount < kMax ? kCount : kMax;
#pragma unroll
  for (int first = 0; first < kCount; first += kStep) {
    const Vec<T, kStep> vec = *reinterpret_cast<const Vec<T, kStep>*>(from + first);
#pragma unroll
    for (int i = 0; i < kStep; ++i) to[first + i] = to_float(vec.x[i]);
  }
}

template <int kCount, typename T>
__device__ __forceinline__ void store(T* to, const float (&from)[kCount]) {
  Vec<T, kCount> vec;
#pragma unroll
  for (int i = 0; i < kCount; ++i) vec.x[i] = from_float<T>(from[i]);
  *reinterpret_cast<Vec<T, kCount>*>(to) = vec;
}

}  // namespace dlattn::tile
