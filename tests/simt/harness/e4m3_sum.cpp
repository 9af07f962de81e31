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

}  // namespace

float add_e4m3_products(float accumulator, const std::uint8_t* a, const std::uint8_t* b,
                        int count) {
  if (!std::isfinite(accumulator)) return accumulator;
  int largest = accumulator == 0.0f ? -126 : std::max(std::ilogb(accumulator), -126);
  const int own = largest;
  for (int i = 0; i < count; ++i) {
    if (is_nan(a[i]) || is_nan(b[i])) return std::numeric_limits<float>::quiet_NaN();
    largest = std::max(largest, E4m3(a[i]).exponent + E4m3(b[i]).exponent);
  }
  const auto bits = static_cast<std::int64_t>(std::ldexp(accumulator, 23 - own));
  std::int64_t sum = shifted(bits, own - largest + kFraction - 23);
  for (int i = 0; i < count; ++i) {
    const E4m3 x(a[i]), y(b[i]);
    sum += shifted(std::int64_t{x.significand} * y.significand,
                   x.exponent + y.exponent - largest + kFraction - 6);
  }
  int excess = 0;
  while (std::abs(sum) >> excess >= std::int64_t{2} << kFraction) ++excess;
  sum = shifted(shifted(sum, -excess), excess);
  return std::ldexp(static_cast<float>(sum), largest - kFraction);
}

}  // namespace simt
