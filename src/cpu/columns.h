#pragma once

#include "cpu/simd.h"

// Columns of rows in memory as vectors: a transposition in registers, 16 bytes of each row at a
// time.
namespace dlattn::cpu::DLATTN_CPU_ISA {

template <typename T>
constexpr int kColumns = 16 / static_cast<int>(sizeof(T));

// Numbers of a and b in turn, of 32 or 64 bits, from the lower or the upper half of each 16 bytes.
#if defined(__AVX512F__)  // masked, since GCC warns about the other intrinsics
DLATTN_INLINE Vec<float> lower_of(Vec<float> a, Vec<float> b) {
  return reinterpret_cast<Vec<float>>(
      _mm512_maskz_unpacklo_ps(0xffff, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
}
DLATTN_INLINE Vec<float> upper_of(Vec<float> a, Vec<float> b) {
  return reinterpret_cast<Vec<float>>(
      _mm512_maskz_unpackhi_ps(0xffff, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
}
DLATTN_INLINE Vec<double> lower_of(Vec<double> a, Vec<double> b) {
  return reinterpret_cast<Vec<double>>(
      _mm512_maskz_unpacklo_pd(0xff, reinterpret_cast<__m512d>(a), reinterpret_cast<__m512d>(b)));
}
DLATTN_INLINE Vec<double> upper_of(Vec<double> a, Vec<double> b) {
  return reinterpret_cast<Vec<double>>(
      _mm512_maskz_unpackhi_pd(0xff, reinterpret_cast<__m512d>(a), reinterpret_cast<__m512d>(b)));
}
#elif defined(__AVX2__)
DLATTN_INLINE Vec<float> lower_of(Vec<float> a, Vec<float> b) {
  return reinterpret_cast<Vec<float>>(
      _mm256_unpacklo_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
}
DLATTN_INLINE Vec<float> upper_of(Vec<float> a, Vec<float> b) {
  return reinterpret_cast<Vec<float>>(
      _mm256_unpackhi_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
}
DLATTN_INLINE Vec<double> lower_of(Vec<double> a, Vec<double> b) {
  return reinterpret_cast<Vec<double>>(
      _mm256_unpacklo_pd(reinterpret_cast<__m256d>(a), reinterpret_cast<__m256d>(b)));
}
DLATTN_INLINE Vec<double> upper_of(Vec<double> a, Vec<double> b) {
  return reinterpret_cast<Vec<double>>(
      _mm256_unpackhi_pd(reinterpret_cast<__m256d>(a), reinterpret_cast<__m256d>(b)));
}
#else
DLATTN_INLINE Vec<float> lower_of(Vec<float> a, Vec<float> b) {
  return Vec<float>{a[0], b[0], a[1], b[1]};
}
DLATTN_INLINE Vec<float> upper_of(Vec<float> a, Vec<float> b) {
  return Vec<float>{a[2], b[2], a[3], b[3]};
}
DLATTN_INLINE Vec<double> lower_of(Vec<double> a, Vec<double> b) {
  return Vec<double>{a[0], b[0]};
}
DLATTN_INLINE Vec<double> upper_of(Vec<double> a, Vec<double> b) {
  return Vec<double>{a[1], b[1]};
}
#endif

// 16 bytes from each of as many rows as a vector has of these, `stride` elements apart.
template <typename T>
DLATTN_INLINE Vec<T> gather_pieces(const T* from, std::int64_t stride) {
#if defined(__AVX512F__)
  const auto piece = [&](int i) {
    return _mm_loadu_ps(reinterpret_cast<const float*>(from + i * stride));
  };
  __m512 pieces = _mm512_castps128_ps512(piece(0));
  pieces = _mm512_maskz_insertf32x4(0xffff, pieces, piece(1), 1);
  pieces = _mm512_maskz_insertf32x4(0xffff, pieces, piece(2), 2);
  pieces = _mm512_maskz_insertf32x4(0xffff, pieces, piece(3), 3);
  return reinterpret_cast<Vec<T>>(pieces);
#elif defined(__AVX2__)
  const __m256 first = _mm256_castps128_ps256(_mm_loadu_ps(reinterpret_cast<const float*>(from)));
  const __m128 second = _mm_loadu_ps(reinterpret_cast<const float*>(from + stride));
  return reinterpret_cast<Vec<T>>(_mm256_insertf128_ps(first, second, 1));
#else
  static_cast<void>(stride);
  return load_unaligned(from);
#endif
}

// Columns [0, kColumns) of kWidth rows at `from`, `stride` elements apart: a row in each lane.
DLATTN_INLINE void load_columns(const float* from, std::int64_t stride, Vec<float>* columns) {
  Vec<float> row[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) row[i] = gather_pieces(from + i * stride, 4 * stride);
  const auto lower = [](Vec<float> a, Vec<float> b) {
    return reinterpret_cast<Vec<double>>(lower_of(a, b));
  };
  const auto upper = [](Vec<float> a, Vec<float> b) {
    return reinterpret_cast<Vec<double>>(upper_of(a, b));
  };
  const Vec<double> first[2] = {lower(row[0], row[1]), upper(row[0], row[1])};
  const Vec<double> second[2] = {lower(row[2], row[3]), upper(row[2], row[3])};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    columns[2 * i] = reinterpret_cast<Vec<float>>(lower_of(first[i], second[i]));
    columns[2 * i + 1] = reinterpret_cast<Vec<float>>(upper_of(first[i], second[i]));
  }
}

DLATTN_INLINE void load_columns(const double* from, std::int64_t stride, Vec<double>* columns) {
  const Vec<double> even = gather_pieces(from, 2 * stride);
  const Vec<double> odd = gather_pieces(from + stride, 2 * stride);
  columns[0] = lower_of(even, odd);
  columns[1] = upper_of(even, odd);
}

// to = the transpose of `rows` x `columns` numbers. It reads whole vectors of rows, 16 bytes of a
// row at a time, and writes whole vectors.
template <typename T>
void transpose(const T* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns,
               T* to, std::int64_t to_stride) {
  for (std::int64_t c = 0; c < columns; c += kColumns<T>) {
    for (std::int64_t r = 0; r < rows; r += kWidth<T>) {
      Vec<T> x[kColumns<T>];
      load_columns(from + r * from_stride + c, from_stride, x);
      for (std::int64_t i = 0; i < kColumns<T> && c + i < columns; ++i)
        store(to + (c + i) * to_stride + r, x[i]);
    }
  }
}

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
