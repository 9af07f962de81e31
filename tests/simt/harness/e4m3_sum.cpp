// Compiled without instrumentation, as what calls it is.
#include "e4m3_sum.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace simt {
namespace {

constexpr int kFraction = 13;

// sign * significand * 2^(exponent - 3), with the exponent that a subnormal number or 0 is stored
// with.
struct E4m3 {
  int significand;  // signed
  int exponent;

  explicit E4m3(std::uint8_t byte) {
    const int stored = byte >> 3 & 15, mantissa = byte & 7;
    significand = stored == 0 ? mantissa : 8 + mantissa;
    if (byte & 0x80) significand = -significand;
    exponent = std::max(stored, 1) - 7;
  }
};

bool is_nan(std::uint8_t byte) {
  return (byte & 0x7F) == 0x7F;
}

// x * 2^shift, cut to an integer.
std::int64_t shifted(std::int64_t x, int shift) {
  if (shift >= 0) return x * (std::int64_t{1} << shift);
  return shift < -62 ? 0 : x / (std::int64_t{1} << -shift);
}

// The sum of the aligned terms, not yet cut, is sum * 2^(largest - kFraction).
struct AlignedSum {
  std::int64_t sum = 0;
  int largest = 0;
  bool nan = false;

  AlignedSum(float accumulator, const std::uint8_t* a, const std::uint8_t* b, int count) {
    largest = accumulator == 0.0f ? -126 : std::max(std::ilogb(accumulator), -126);
    const int own = largest;
    for (int i = 0; i < count; ++i) {
      nan |= is_nan(a[i]) || is_nan(b[i]);
      largest = std::max(largest, E4m3(a[i]).exponent + E4m3(b[i]).exponent);
    }
    if (nan) return;
    const auto bits = static_cast<std::int64_t>(std::ldexp(accumulator, 23 - own));
    sum = shifted(bits, own - largest + kFraction - 23);
    for (int i = 0; i < count; ++i) {
      const E4m3 x(a[i]), y(b[i]);
      sum += shifted(std::int64_t{x.significand} * y.significand,
                     x.exponent + y.exponent - largest + kFraction - 6);
    }
  }
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

float add_e4m3_products(float accumulator, const std::uint8_t* a, const std::uint8_t* b,
                        int count) {
  if (!std::isfinite(accumulator)) return accumulator;
  const AlignedSum aligned(accumulator, a, b, count);
  if (aligned.nan) return kNan;
  std::int64_t sum = aligned.sum;
  int excess = 0;
  while (std::abs(sum) >> excess >= std::int64_t{2} << kFraction) ++excess;
  sum = shifted(shifted(sum, -excess), excess);
  return std::ldexp(static_cast<float>(sum), aligned.largest - kFraction);
}

float add_e4m3_products_to_half(float accumulator, const std::uint8_t* a, const std::uint8_t* b,
                                int count) {
  if (!std::isfinite(accumulator)) return accumulator;
  const AlignedSum aligned(accumulator, a, b, count);
  if (aligned.nan) return kNan;
  const double sum = std::ldexp(static_cast<double>(aligned.sum), aligned.largest - kFraction);
  if (std::abs(sum) >= 65520.0) return std::copysign(INFINITY, static_cast<float>(sum));
  const int last = sum == 0.0 ? -24 : std::max(std::ilogb(sum), -14) - 10;
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(sum, -last)), last));
}

}  // namespace simt
