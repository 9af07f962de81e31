#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/convert.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// SIMD vectors, as wide as the instruction set that this file is compiled for allows. They are the
// compiler's vector extension, so arithmetic, comparison and selection are plain operators on every
// architecture; what follows adds only what the operators lack.
//
// Every kernels_<isa>.cpp includes this with its own DLATTN_CPU_ISA. All that is defined here has
// internal linkage or lives in that namespace, and nothing is called that other files might
// instantiate as well (no std:: templates): the linker would keep one copy, and it might be the one
// with instructions that this processor lacks.
namespace dlattn::cpu::DLATTN_CPU_ISA {

#define DLATTN_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kNumRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kNumRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kNumRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kNumRegisters = 16;
#endif

template <typename T>
struct LaneIntOf;
template <>
struct LaneIntOf<float> {
  using Type = std::int32_t;
};
template <>
struct LaneIntOf<double> {
  using Type = std::int64_t;
};
template <typename T>
using LaneInt = typename LaneIntOf<T>::Type;

template <typename T>
struct VecOf {
  typedef T Type __attribute__((vector_size(kVectorBytes), may_alias));
};
template <typename T>
using Vec = typename VecOf<T>::Type;

template <typename T>
constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
DLATTN_INLINE Vec<T> load(const T* from) {  // of scratch memory: aligned to kVectorBytes
  return *reinterpret_cast<const Vec<T>*>(from);
}

template <typename T>
DLATTN_INLINE void store(T* to, Vec<T> value) {
  *reinterpret_cast<Vec<T>*>(to) = value;
}

template <typename T>
DLATTN_INLINE Vec<T> load_unaligned(const T* from) {
  Vec<T> value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
DLATTN_INLINE void store_unaligned(T* to, Vec<T> value) {
  std::memcpy(to, &value, sizeof(value));
}

template <typename T>
DLATTN_INLINE Vec<T> broadcast(T value) {
  return value - Vec<T>{};
}

// The larger of y and x; x where either is NaN.
#if defined(__AVX512F__)  // GCC makes a comparison and a blend of the selection, and warns about
                          // the unmasked intrinsics
DLATTN_INLINE Vec<float> max(Vec<float> y, Vec<float> x) {
  return reinterpret_cast<Vec<float>>(
      _mm512_maskz_max_ps(0xffff, reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(x)));
}
DLATTN_INLINE Vec<double> max(Vec<double> y, Vec<double> x) {
  return reinterpret_cast<Vec<double>>(
      _mm512_maskz_max_pd(0xff, reinterpret_cast<__m512d>(y), reinterpret_cast<__m512d>(x)));
}
#else
DLATTN_INLINE Vec<float> max(Vec<float> y, Vec<float> x) {
  return y > x ? y : x;
}
DLATTN_INLINE Vec<double> max(Vec<double> y, Vec<double> x) {
  return y > x ? y : x;
}
#endif

// to[0 .. count) = from[0 .. count) in the type that is computed with.
DLATTN_INLINE void convert_row(const BFloat16* from, std::int64_t count, float* to) {
  constexpr int kStep = kWidth<float>;
  typedef std::uint16_t Bits16 __attribute__((vector_size(kStep * 2)));
  typedef std::uint32_t Bits32 __attribute__((vector_size(kVectorBytes)));
  std::int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    Bits16 bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    store_unaligned(to + i,
                    reinterpret_cast<Vec<float>>(__builtin_convertvector(bits, Bits32) << 16));
  }
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

DLATTN_INLINE void convert_row(const Half* from, std::int64_t count, float* to) {
  std::int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    _mm512_storeu_ps(to + i,
                     _mm512_maskz_cvtph_ps(
                         0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
  }
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#elif defined(__aarch64__)
  for (; i + 4 <= count; i += 4) {
    const uint16x4_t bits = vld1_u16(reinterpret_cast<const std::uint16_t*>(from + i));
    vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(bits)));
  }
#endif
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

DLATTN_INLINE void convert_row(const Float8* from, std::int64_t count, float* to) {
  constexpr int kStep = kWidth<float>;
  typedef std::uint8_t Bits8 __attribute__((vector_size(kStep)));
  typedef std::uint32_t Bits32 __attribute__((vector_size(kVectorBytes)));
  std::int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    Bits8 bytes;
    std::memcpy(&bytes, from + i, sizeof(bytes));
    const Bits32 bits = __builtin_convertvector(bytes, Bits32);
    const Bits32 magnitude = bits & 0x7f;
    const Vec<float> scaled = reinterpret_cast<Vec<float>>(magnitude << 20) * 0x1p120f;
    const Bits32 finite = reinterpret_cast<Bits32>(scaled);
    const Bits32 number = magnitude == 0x7f ? Bits32{} + 0x7fc00000u : finite;
    store_unaligned(to + i, reinterpret_cast<Vec<float>>(number | (bits & 0x80) << 24));
  }
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

DLATTN_INLINE void convert_row(const Int8* from, std::int64_t count, float* to) {
  constexpr int kStep = kWidth<float>;
  typedef std::int8_t Bytes __attribute__((vector_size(kStep)));
  std::int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    Bytes bytes;
    std::memcpy(&bytes, from + i, sizeof(bytes));
    store_unaligned(to + i, __builtin_convertvector(bytes, Vec<float>));
  }
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

// And back, rounding to nearest even.
DLATTN_INLINE void convert_row(const float* from, std::int64_t count, BFloat16* to) {
  constexpr int kStep = kWidth<float>;
  typedef std::uint16_t Bits16 __attribute__((vector_size(kStep * 2)));
  typedef std::uint32_t Bits32 __attribute__((vector_size(kVectorBytes)));
  std::int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const Vec<float> value = load_unaligned(from + i);
    const Bits32 bits = reinterpret_cast<Bits32>(value);
    const Bits32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const Bits32 nan = bits | 0x400000;  // rounding up could turn it into infinity
    const Bits16 result = __builtin_convertvector((value == value ? rounded : nan) >> 16, Bits16);
    std::memcpy(to + i, &result, sizeof(result));
  }
  for (; i < count; ++i) from_float(from[i], &to[i]);
}

DLATTN_INLINE void convert_row(const float* from, std::int64_t count, Half* to) {
  std::int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
  }
#elif defined(__aarch64__)
  for (; i + 4 <= count; i += 4) {
    const float16x4_t halves = vcvt_f16_f32(vld1q_f32(from + i));
    vst1_u16(reinterpret_cast<std::uint16_t*>(to + i), vreinterpret_u16_f16(halves));
  }
#endif
  for (; i < count; ++i) from_float(from[i], &to[i]);
}

template <typename T>
DLATTN_INLINE void convert_row(const T* from, std::int64_t count, T* to) {
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(T));
}

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
