// Compiled without instrumentation, as what calls it is.
#include "e4m3_sum.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace simt {
namespace {

constexpr int kFraction = 13;
constexpr int kBelowAll = -1000;

struct E4m3 {
  float value;
  std::int16_t exponent;
  bool nan;
};

// All 256 of them.
struct Decoded {
  E4m3 of[256];

  constexpr Decoded() : of() {
    for (int byte = 0; byte < 256; ++byte) {
      const int stored = byte >> 3 & 15, mantissa = byte & 7;
      const int exponent = (stored == 0 ? 1 : stored) - 7;
      float value = static_cast<float>(stored == 0 ? mantissa : 8 + mantissa);
      for (int i = exponent - 3; i < 0; ++i) value *= 0.5f;
      for (int i = exponent - 3; i > 0; --i) value *= 2.0f;
      of[byte].value = byte & 0x80 ? -value : value;
      of[byte].exponent = static_cast<std::int16_t>(exponent);
      of[byte].nan = (byte & 0x7F) == 0x7F;
    }
  }
};
constexpr Decoded kE4m3;

// x * 2^shift, cut to an integer. Magnitudes are shifted: a negative number is cut towards 0 too.
std::int64_t shifted(std::int64_t x, int shift) {
  if (shift >= 0) return x * (std::int64_t{1} << shift);
  if (shift < -62) return 0;
  return x < 0 ? -(-x >> -shift) : x >> -shift;
}

// 2^exponent, where that is a normal number.
float power_of_two(int exponent) {
  const auto bits = static_cast<std::uint32_t>(exponent + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}
double double_power_of_two(int exponent) {
  const auto bits = static_cast<std::uint64_t>(exponent + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// kCount is known here and below, so that the compiler makes vectors of the loops.
template <int kCount>
int largest_exponent(const E4m3Numbers& a, const E4m3Numbers& b) {
  std::int16_t largest = 2 * kBelowAll;
  for (int i = 0; i < kCount; ++i) {
    const auto exponent = static_cast<std::int16_t>(a.exponents[i] + b.exponents[i]);
    largest = std::max(largest, exponent);
  }
  return largest;
}

// The products times `scale`, each cut to an integer.
template <int kCount>
std::int32_t sum_of_cut(const E4m3Numbers& a, const E4m3Numbers& b, float scale) {
  std::int32_t sum = 0;
  for (int i = 0; i < kCount; ++i)
    sum += static_cast<std::int32_t>(a.values[i] * b.values[i] * scale);
  return sum;
}

// The sum of the aligned terms, not yet cut, is sum * 2^(largest - kFraction).
struct AlignedSum {
  std::int64_t sum = 0;
  int largest = 0;

  AlignedSum(float accumulator, const E4m3Numbers& a, const E4m3Numbers& b) {
    const bool few = a.count <= E4m3Numbers::kMax / 2;
    std::uint32_t bits;
    std::memcpy(&bits, &accumulator, sizeof bits);
    const int stored = static_cast<int>(bits >> 23 & 255);
    const auto fraction = static_cast<std::int64_t>(bits & 0x7FFFFF);
    const std::int64_t magnitude = stored == 0 ? fraction : fraction + 0x800000;
    const int own = std::max(stored, 1) - 127;
    largest = std::max(own, few ? largest_exponent<E4m3Numbers::kMax / 2>(a, b)
                                : largest_exponent<E4m3Numbers::kMax>(a, b));
    sum = shifted(accumulator < 0 ? -magnitude : magnitude, own - largest + kFraction - 23);
    // Products have 8 bits and are at most 2^largest * 4: exact before they are cut.
    const float scale = power_of_two(kFraction - largest);
    sum += few ? sum_of_cut<E4m3Numbers::kMax / 2>(a, b, scale)
               : sum_of_cut<E4m3Numbers::kMax>(a, b, scale);
  }
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

E4m3Numbers::E4m3Numbers(const std::uint8_t* bytes, int number) : count(number) {
  for (int i = 0; i < count; ++i) {
    const E4m3& x = kE4m3.of[bytes[i]];
    values[i] = x.value, exponents[i] = x.exponent, nan |= x.nan;
  }
  for (int i = count; i < kMax; ++i) exponents[i] = kBelowAll;
}

float add_e4m3_products(float accumulator, const E4m3Numbers& a, const E4m3Numbers& b) {
  if (!std::isfinite(accumulator)) return accumulator;
  if (a.nan || b.nan) return kNan;
  const AlignedSum aligned(accumulator, a, b);
  std::int64_t sum = aligned.sum;
  int excess = 0;
  while (std::abs(sum) >> excess >= std::int64_t{2} << kFraction) ++excess;
  sum = shifted(shifted(sum, -excess), excess);
  return static_cast<float>(static_cast<double>(sum) *
                            double_power_of_two(aligned.largest - kFraction));
}

float add_e4m3_products_to_half(float accumulator, const E4m3Numbers& a, const E4m3Numbers& b) {
  if (!std::isfinite(accumulator)) return accumulator;
  if (a.nan || b.nan) return kNan;
  const AlignedSum aligned(accumulator, a, b);
  const double sum =
      static_cast<double>(aligned.sum) * double_power_of_two(aligned.largest - kFraction);
  if (std::abs(sum) >= 65520.0) return std::copysign(INFINITY, static_cast<float>(sum));
  const int last = sum == 0.0 ? -24 : std::max(std::ilogb(sum), -14) - 10;
  return static_cast<float>(std::nearbyint(sum * double_power_of_two(-last)) *
                            double_power_of_two(last));
}

}  // namespace simt
