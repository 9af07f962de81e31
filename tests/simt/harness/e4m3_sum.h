#pragma once

#include <cstdint>

// How tensor cores of compute capability 8.9 and 9.0 add up products of e4m3, as Microsoft's
// MMA-Sim describes them (arXiv 2511.10909).
namespace simt {

// Up to 32 numbers of e4m3, one after the other in memory, ready for sums of their products: most
// numbers are in many of them.
struct E4m3Numbers {
  static constexpr int kMax = 32;

  E4m3Numbers() = default;
  E4m3Numbers(const std::uint8_t* bytes, int count);

  float values[kMax] = {};  // 0 beyond `count`
  // The exponents that they are stored with, of a subnormal number or 0 too; beyond `count` ones
  // below all others.
  std::int16_t exponents[kMax] = {};
  int count = 0;
  bool nan = false;
};

// The accumulator plus the products of the pairs of numbers: all of them are aligned to the largest
// of their exponents and cut to 13 bits of fraction, added, and the sum is cut to 13 bits of
// fraction. An accumulator is fp32.
float add_e4m3_products(float accumulator, const E4m3Numbers& a, const E4m3Numbers& b);

// The same with an accumulator of fp16: the sum is rounded to it, to nearest even, after each so
// many products. From 65520 on it is infinity.
float add_e4m3_products_to_half(float accumulator, const E4m3Numbers& a, const E4m3Numbers& b);

}  // namespace simt
