#pragma once

#include <float.h>

#include "cpu/simd.h"

// exp2 and tanh of vectors. The polynomials interpolate at Chebyshev nodes; the errors given are
// relative, of the polynomial alone, to which rounding adds about one unit in the last place.
namespace dlattn::cpu::DLATTN_CPU_ISA {

template <typename T>
struct MathConstants;

template <>
struct MathConstants<float> {
  static constexpr float kLargest = FLT_MAX;
  static constexpr float kLog2E = 0x1.715476p+0f;
  // Adding it to a number of magnitude < 2^22 leaves that number, rounded, plus the exponent's bias
  // in the low bits.
  static constexpr float kRound = 0x1.8p23f + 127.0f;
  static constexpr int kMantissaBits = 23;
  static constexpr float kExpMin = -127.0f;  // the first power whose exponent field is 0
  static constexpr float kExpMax = 127.0f;
  // 2^x on [-1/2, 1/2]; 2.6e-9
  static constexpr float kExp2[] = {0x1.000000p+0f, 0x1.62e430p-1f,  0x1.ebfbe0p-3f, 0x1.c6aeccp-5f,
                                    0x1.3b2a1cp-7f, 0x1.5f48c0p-10f, 0x1.444000p-13f};
  // (tanh(x) - x) / x^3 as a polynomial in x^2 on [0, 0.4]; 5.6e-9
  static constexpr float kTanh[] = {-0x1.555556p-2f, 0x1.1110e4p-3f,  -0x1.ba0718p-5f,
                                    0x1.648e8ep-6f,  -0x1.10bbf4p-7f, 0x1.2977d8p-9f};
};

template <>
struct MathConstants<double> {
  static constexpr double kLargest = DBL_MAX;
  static constexpr double kLog2E = 0x1.71547652b82fep+0;
  static constexpr double kRound = 0x1.8p52 + 1023.0;
  static constexpr int kMantissaBits = 52;
  static constexpr double kExpMin = -1023.0;
  static constexpr double kExpMax = 1023.0;
  // 4.3e-18
  static constexpr double kExp2[] = {
      0x1.0000000000000p+0,  0x1.62e42fefa39efp-1,  0x1.ebfbdff82c5afp-3,  0x1.c6b08d704a0c7p-5,
      0x1.3b2ab6fb9f192p-7,  0x1.5d87fe78a3dbep-10, 0x1.430913112f3eap-13, 0x1.ffcbfc6e542c5p-17,
      0x1.62bfc2c181ef3p-20, 0x1.b524ea15d0174p-24, 0x1.e622974545e0ap-28, 0x1.e9ef4cd7fae1bp-32};
  // 1.1e-16, times x^3 / tanh(x) < 0.2
  static constexpr double kTanh[] = {
      -0x1.5555555555555p-2,  0x1.1111111111089p-3,  -0x1.ba1ba1ba0c0e6p-5,  0x1.664f487d0fcaap-6,
      -0x1.226e344998c73p-7,  0x1.d6d3929537f26p-9,  -0x1.7d9eed6318048p-10, 0x1.3521d94847c18p-11,
      -0x1.f202b3d19dd3dp-13, 0x1.8344d85392bdep-14, -0x1.037ec6bbbd93cp-15, 0x1.aa990f25e9572p-18};
};

template <typename T, int kCount>
DLATTN_INLINE Vec<T> polynomial(Vec<T> x, const T (&coefficients)[kCount]) {
  Vec<T> sum = broadcast(coefficients[kCount - 1]);
#pragma GCC unroll 16
  for (int i = kCount - 2; i >= 0; --i) sum = sum * x + coefficients[i];
  return sum;
}

// 2^(x - shift) for x <= kExpMax: exactly 0 for x below kExpMin + shift, -inf included; NaN stays
// NaN.
template <typename T, int kShift = 0>
DLATTN_INLINE Vec<T> exp2(Vec<T> x) {
  using C = MathConstants<T>;
  typedef LaneInt<T> Int __attribute__((vector_size(kVectorBytes)));
  constexpr T kRound = C::kRound - T(kShift);
  x = max(broadcast(C::kExpMin + T(kShift)), x);
  const Vec<T> rounded = x + kRound;
  const Vec<T> fraction = x - (rounded - kRound);
  const Int exponent = reinterpret_cast<Int>(rounded) << C::kMantissaBits;
  return polynomial<T>(fraction, C::kExp2) * reinterpret_cast<Vec<T>>(exponent);
}

template <typename T>
DLATTN_INLINE Vec<T> tanh(Vec<T> x) {
  using C = MathConstants<T>;
  const Vec<T> size = x < T(0) ? -x : x;
  const Vec<T> square = x * x;
  const Vec<T> near_zero = x + x * square * polynomial<T>(square, C::kTanh);
  // 1 - 2 / (e^2|x| + 1); at 32 that is 1 in any precision. The limit comes second in max, which
  // lets a NaN through.
  const Vec<T> limited = -max(broadcast(T(-32)), -size);
  const Vec<T> large = T(1) - T(2) / (exp2<T>(limited * (T(2) * C::kLog2E)) + T(1));
  return size < T(0.625) ? near_zero : (x < T(0) ? -large : large);
}

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
