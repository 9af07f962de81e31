// exp2, tanh, the conversions of cpu/simd*.h and the transposition of cpu/columns.h, for the
// instruction set that this file is compiled for.
#if defined(__AVX512F__)
#define DLATTN_CPU_ISA avx512
#elif defined(__AVX2__)
#define DLATTN_CPU_ISA avx2
#else
#define DLATTN_CPU_ISA portable
#endif
#include <cmath>
#include <limits>

#include "check.h"
#include "cpu/columns.h"
#include "cpu/simd_math.h"

namespace simd = dlattn::cpu::DLATTN_CPU_ISA;

namespace {

bool available() {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return true;
#endif
}

template <typename T>
T exp2_of(T x) {
  return simd::exp2<T>(simd::broadcast(x))[simd::kWidth<T> - 1];
}

template <typename T>
T tanh_of(T x) {
  return simd::tanh<T>(simd::broadcast(x))[0];
}

// Largest error in units in the last place, over [low, high] in steps.
template <typename T, typename Got, typename Want>
double worst_ulps(T low, T high, int steps, Got got, Want want) {
  double worst = 0;
  for (int i = 0; i <= steps; ++i) {
    const T x = low + (high - low) * static_cast<T>(i) / static_cast<T>(steps);
    const long double exact = want(static_cast<long double>(x));
    const long double unit =
        std::ldexp(static_cast<long double>(std::numeric_limits<T>::epsilon()), std::ilogb(exact));
    const double ulps =
        static_cast<double>(std::fabs((static_cast<long double>(got(x)) - exact) / unit));
    if (!(ulps <= worst)) worst = ulps;
  }
  return worst;
}

template <typename T>
void functions(T exp_min) {
  const auto exact_exp2 = [](long double x) { return std::exp2(x); };
  const auto exact_tanh = [](long double x) { return std::tanh(x); };
  CHECK((worst_ulps<T>(exp_min, 0, 200001, exp2_of<T>, exact_exp2)) < 1.5);
  CHECK((worst_ulps<T>(0, 64, 20001, exp2_of<T>, exact_exp2)) < 1.5);
  CHECK((worst_ulps<T>(T(1e-6), T(0.7), 100001, tanh_of<T>, exact_tanh)) < 2.5);
  CHECK((worst_ulps<T>(T(-0.7), T(-1e-6), 100001, tanh_of<T>, exact_tanh)) < 2.5);
  CHECK((worst_ulps<T>(T(0.6), 50, 100001, tanh_of<T>, exact_tanh)) < 2.5);
  CHECK((worst_ulps<T>(-50, T(-0.6), 100001, tanh_of<T>, exact_tanh)) < 2.5);

  const T inf = std::numeric_limits<T>::infinity();
  const T nan = std::numeric_limits<T>::quiet_NaN();
  CHECK(exp2_of<T>(0) == T(1));
  CHECK(exp2_of<T>(-3) == T(0.125));
  CHECK(exp2_of<T>(-inf) == T(0));
  CHECK(exp2_of<T>(exp_min * 2) == T(0));
  CHECK(exp2_of<T>(T(-1e30)) == T(0));
  CHECK(std::isnan(exp2_of<T>(nan)));
  // A shift is exact, down to where the power leaves the normal numbers.
  const auto shifted = [](T x) { return simd::exp2<T, 12>(simd::broadcast(x))[0]; };
  int wrong = 0;
  for (int i = 0; i <= 10000; ++i) {
    const T x = (exp_min + 12) * static_cast<T>(i) / 10000;
    wrong += shifted(x) != exp2_of<T>(x) / 4096;
  }
  CHECK_EQ(wrong, 0);
  CHECK(shifted(exp_min + 10) == T(0));
  CHECK(shifted(-inf) == T(0));
  CHECK(std::isnan(shifted(nan)));
  CHECK(tanh_of<T>(0) == T(0));
  CHECK(tanh_of<T>(inf) == T(1));
  CHECK(tanh_of<T>(-inf) == T(-1));
  CHECK(std::isnan(tanh_of<T>(nan)));
}

// Every 16-bit pattern, by vectors and by the scalars, there and back.
template <typename In>
void conversions() {
  constexpr int kCount = 65536;
  static In from[kCount + 3];
  static float to[kCount + 3];
  for (int i = 0; i < kCount + 3; ++i) from[i].bits = static_cast<std::uint16_t>(i);
  simd::convert_row(from, kCount + 3, to);
  int wrong = 0, wrong_back = 0;
  for (int i = 0; i < kCount + 3; ++i) {
    const float scalar = dlattn::cpu::to_float(from[i]);
    if (std::isnan(scalar)) {
      wrong += !std::isnan(to[i]);
      In back;
      dlattn::cpu::from_float(scalar, &back);
      wrong_back += !std::isnan(dlattn::cpu::to_float(back));
    } else {
      wrong += !(to[i] == scalar && std::signbit(to[i]) == std::signbit(scalar));
      In back;
      dlattn::cpu::from_float(scalar, &back);
      wrong_back += back.bits != from[i].bits;
    }
  }
  CHECK_EQ(wrong, 0);
  CHECK_EQ(wrong_back, 0);

  // From float, vectors and scalars agree on everything, halfway cases and overflow included.
  static In rounded[kCount + 3];
  for (int i = 0; i < kCount + 3; ++i) {
    to[i] =
        dlattn::cpu::float_from_bits(static_cast<std::uint32_t>(i) << 16 | (i * 40503u & 0xf000u));
  }
  simd::convert_row(to, kCount + 3, rounded);
  int wrong_rounded = 0;
  for (int i = 0; i < kCount + 3; ++i) {
    In scalar;
    dlattn::cpu::from_float(to[i], &scalar);
    const float a = dlattn::cpu::to_float(rounded[i]), b = dlattn::cpu::to_float(scalar);
    wrong_rounded += std::isnan(b) ? !std::isnan(a) : rounded[i].bits != scalar.bits;
  }
  CHECK_EQ(wrong_rounded, 0);
}

// Rows that lie apart; whole vectors of them, and any number of columns.
template <typename T>
void transpositions() {
  constexpr int kRows = 2 * simd::kWidth<T>, kStride = 15, kLongRow = kRows + simd::kWidth<T>;
  static T from[kRows * kStride];
  alignas(64) static T to[kStride * kLongRow];
  for (int i = 0; i < kRows * kStride; ++i) from[i] = static_cast<T>(i + 1);
  for (const int columns : {1, 7, 11}) {
    for (T& x : to) x = T(-1);
    simd::transpose(from, kStride, kRows, columns, to, kLongRow);
    int wrong = 0;
    for (int c = 0; c < kStride; ++c) {
      for (int r = 0; r < kLongRow; ++r) {
        const bool written = c < columns && r < kRows;
        wrong += to[c * kLongRow + r] != (written ? from[r * kStride + c] : T(-1));
      }
    }
    CHECK_EQ(wrong, 0);
  }
}

template <typename In>
std::uint16_t rounded(float value) {
  In result;
  dlattn::cpu::from_float(value, &result);
  return result.bits;
}

// Halfway cases go to even; too large goes to infinity; NaN stays NaN.
void rounding() {
  using dlattn::cpu::BFloat16;
  using dlattn::cpu::Half;
  CHECK_EQ(rounded<Half>(1.0f + 0x1p-11f), 0x3c00);
  CHECK_EQ(rounded<Half>(1.0f + 0x1p-11f + 0x1p-20f), 0x3c01);
  CHECK_EQ(rounded<Half>(1.0f + 0x3p-11f), 0x3c02);
  CHECK_EQ(rounded<Half>(65519.0f), 0x7bff);
  CHECK_EQ(rounded<Half>(65520.0f), 0x7c00);
  CHECK_EQ(rounded<Half>(-1e30f), 0xfc00);
  CHECK_EQ(rounded<Half>(0x1p-24f), 0x0001);
  CHECK_EQ(rounded<Half>(0x1p-25f), 0x0000);
  CHECK_EQ(rounded<Half>(0x1.8p-25f), 0x0001);
  CHECK_EQ(rounded<Half>(0x1p-14f - 0x1p-26f), 0x0400);
  CHECK_EQ(rounded<Half>(-0.0f), 0x8000);
  CHECK_EQ(rounded<BFloat16>(1.0f + 0x1p-8f), 0x3f80);
  CHECK_EQ(rounded<BFloat16>(1.0f + 0x3p-8f), 0x3f82);
  CHECK_EQ(rounded<BFloat16>(3.4e38f), 0x7f80);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK((rounded<Half>(nan) & 0x7fff) > 0x7c00);
  CHECK((rounded<BFloat16>(nan) & 0x7fff) > 0x7f80);
  CHECK((rounded<BFloat16>(dlattn::cpu::float_from_bits(0x7fffffff)) & 0x7fff) > 0x7f80);
}

}  // namespace

int main() {
  if (!available()) {
    std::printf("skipped: this processor lacks the instructions\n");
    return 0;
  }
  functions<float>(-126.0f);
  functions<double>(-1022.0);
  conversions<dlattn::cpu::Half>();
  conversions<dlattn::cpu::BFloat16>();
  transpositions<float>();
  transpositions<double>();
  rounding();
  return test::summary();
}
