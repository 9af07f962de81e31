#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/problem/rounding.h"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/permute.cuh"
#include "instructions.h"

// Conversions to 8 bits, permutations of bytes, and maxima.
namespace dlattn::test {

// The number that a byte of e4m3 stands for: 4 bits of exponent, 3 of mantissa, no infinity.
inline float from_e4m3(int byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 0x7F) == 0x7F) return NAN;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return byte & 0x80 ? -magnitude : magnitude;
}

// The byte nearest to a number, the even one of two.
inline int nearest_e4m3(float x) {
  if (std::isnan(x)) return 0x7F;
  const int sign = std::signbit(x) ? 0x80 : 0;
  const double magnitude = std::min(std::abs(static_cast<double>(x)), 448.0);
  int nearest = 0;
  for (int byte = 1; byte < 0x7F; ++byte) {
    const double gain =
        std::abs(from_e4m3(nearest) - magnitude) - std::abs(from_e4m3(byte) - magnitude);
    if (gain > 0.0 || (gain == 0.0 && byte % 2 == 0)) nearest = byte;
  }
  return sign | nearest;
}

struct Conversions {
  static constexpr int kThreads = 128;
  const float* numbers;
  std::uint32_t* packed;  // one for every four
  int count;

  int smem_bytes() const { return 16; }
  __device__ void operator()() const {
    for (int i = static_cast<int>(threadIdx.x); i < count / 4; i += kThreads) {
      const float* x = numbers + 4 * i;
      packed[i] = ptx::convert_e4m3x4(x[0], x[1], x[2], x[3]);
    }
  }
};

// Every number of e4m3, those in the middle of two and next to that, and what is beyond.
template <typename World>
void test_conversions(World& world, Checks* checks) {
  const char* const name = "cvt to e4m3";
  if (!checks->wants(name)) return;
  std::vector<float> numbers = {500.0f, 1e30f, 464.0f, 465.0f, INFINITY, NAN, 1e-30f, 0x1p-140f};
  for (int byte = 0; byte < 0x7E; ++byte) {
    const float x = from_e4m3(byte), next = from_e4m3(byte + 1);
    const float middle = (x + next) / 2.0f;
    for (const float y : {x, middle, std::nextafter(middle, x), std::nextafter(middle, next)})
      numbers.push_back(y);
  }
  const int half = static_cast<int>(numbers.size()), count = 2 * half;
  Conversions conversions{nullptr, world.template allocate<std::uint32_t>(count / 4), count};
  auto* all = world.template allocate<float>(count);
  for (int i = 0; i < count; ++i) all[i] = i < half ? numbers[i] : -numbers[i - half];
  conversions.numbers = all;
  std::vector<std::uint32_t> expected(count / 4);
  for (int i = 0; i < count; ++i)
    expected[i / 4] |= static_cast<std::uint32_t>(nearest_e4m3(all[i])) << i % 4 * 8;
  world.launch(conversions);
  checks->expect_equal(conversions.packed, expected.data(), count / 4, name);
}

struct IntegerConversions {
  static constexpr int kThreads = 128;
  const float* numbers;
  std::uint32_t* packed;  // one for every four
  int count;

  int smem_bytes() const { return 16; }
  __device__ void operator()() const {
    for (int i = static_cast<int>(threadIdx.x); i < count / 4; i += kThreads) {
      const float* x = numbers + 4 * i;
      packed[i] = ptx::convert_s8x4(x[0], x[1], x[2], x[3]);
    }
  }
};

// Every signed byte, what is in the middle of two and next to that, and what is beyond.
template <typename World>
void test_integer_conversions(World& world, Checks* checks) {
  const char* const name = "cvt to signed bytes";
  if (!checks->wants(name)) return;
  std::vector<float> numbers;
  std::vector<int> bytes;
  const auto add = [&](float x, int byte) { numbers.push_back(x), bytes.push_back(byte); };
  for (int i = -128; i < 127; ++i) {
    const float middle = static_cast<float>(i) + 0.5f;
    add(static_cast<float>(i), i);
    add(middle, i % 2 == 0 ? i : i + 1);
    add(std::nextafter(middle, -1e9f), i);
    add(std::nextafter(middle, 1e9f), i + 1);
  }
  add(127.0f, 127), add(127.4f, 127), add(200.0f, 127), add(1e30f, 127), add(INFINITY, 127);
  add(-129.0f, -128), add(-1e30f, -128), add(-INFINITY, -128);
  add(NAN, 0), add(-0.0f, 0), add(1e-40f, 0), add(-0.4f, 0);
  const int count = static_cast<int>(numbers.size());
  IntegerConversions conversions{nullptr, world.template allocate<std::uint32_t>(count / 4), count};
  auto* all = world.template allocate<float>(count);
  std::copy(numbers.begin(), numbers.end(), all);
  conversions.numbers = all;
  std::vector<std::uint32_t> expected(count / 4);
  for (int i = 0; i < count; ++i)
    expected[i / 4] |= (static_cast<std::uint32_t>(bytes[i]) & 0xFFu) << i % 4 * 8;
  world.launch(conversions);
  checks->expect_equal(conversions.packed, expected.data(), count / 4, name);
}

struct Permutations {
  static constexpr int kThreads = 32;
  std::uint32_t* permuted;  // [4]

  int smem_bytes() const { return 16; }
  __device__ void operator()() const {
    if (threadIdx.x != 0) return;
    const std::uint32_t a = 0x33221100u, b = 0x77665544u;
    permuted[0] = ptx::permute_bytes<0x6420>(a, b);
    permuted[1] = ptx::permute_bytes<0x7531>(a, b);
    permuted[2] = ptx::permute_bytes<0x5410>(a, b);
    permuted[3] = ptx::permute_bytes<0x0123>(a, b);
  }
};

template <typename World>
void test_permutations(World& world, Checks* checks) {
  const char* const name = "prmt";
  if (!checks->wants(name)) return;
  const Permutations permutations{world.template allocate<std::uint32_t>(4)};
  const std::uint32_t expected[] = {0x66442200u, 0x77553311u, 0x55441100u, 0x00112233u};
  world.launch(permutations);
  checks->expect_equal(permutations.permuted, expected, 4, name);
}

// The maxima of two pairs of 16-bit numbers, and of two floats.
struct Maxima {
  static constexpr int kThreads = 128;
  const std::uint32_t* x;
  const std::uint32_t* y;
  std::uint32_t* largest;  // as half, as bfloat16, as float
  int count;

  int smem_bytes() const { return 16; }
  __device__ void operator()() const {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      largest[i] = ptx::max_magnitudes<half>(x[i], y[i]);
      largest[count + i] = ptx::max_magnitudes<__nv_bfloat16>(x[i], y[i]);
      const float z = ptx::max_or_nan(float_of_bits(x[i]), float_of_bits(y[i]));
      largest[2 * count + i] = bits_of(z);
    }
  }
};

// The larger of two magnitudes of 16 bits. Those above infinity are NaN, all the same here.
inline std::uint32_t larger_magnitude(std::uint32_t x, std::uint32_t y, std::uint32_t infinity) {
  constexpr std::uint32_t kNan = 0x7FFFu;
  x &= 0x7FFFu, y &= 0x7FFFu;
  if (x > infinity) return y > infinity ? kNan : y;
  return y > infinity ? x : std::max(x, y);
}

template <typename World>
void test_maxima(World& world, Checks* checks) {
  const char* const name = "max";
  if (!checks->wants(name)) return;
  // Zeros, subnormal and normal numbers, infinities and NaN of half and of bfloat16.
  const std::uint32_t numbers[] = {0x0000, 0x8000, 0x0001, 0x8002, 0x3C00, 0xBC01, 0x7BFF, 0x7C00,
                                   0xFC00, 0x7C01, 0xFE00, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF};
  constexpr int kNumbers = 16, kCount = kNumbers * kNumbers;
  constexpr std::uint32_t kHalf = 0x7C00, kBFloat16 = 0x7F80;
  auto* x = world.template allocate<std::uint32_t>(kCount);
  auto* y = world.template allocate<std::uint32_t>(kCount);
  std::vector<std::uint32_t> expected(3 * kCount);
  for (int i = 0; i < kCount; ++i) {
    const std::uint32_t a = numbers[i / kNumbers], b = numbers[i % kNumbers];
    x[i] = a << 16 | b, y[i] = b << 16 | numbers[i / 3 % kNumbers];
    for (const int shift : {0, 16}) {
      const std::uint32_t low = x[i] >> shift, high = y[i] >> shift;
      expected[i] |= larger_magnitude(low, high, kHalf) << shift;
      expected[kCount + i] |= larger_magnitude(low, high, kBFloat16) << shift;
    }
    const float p = float_of_bits(x[i]), q = float_of_bits(y[i]);
    expected[2 * kCount + i] =
        std::isnan(p) || std::isnan(q) ? 0x7FC00000u : bits_of(p > q ? p : q);
  }
  const Maxima maxima{x, y, world.template allocate<std::uint32_t>(3 * kCount), kCount};
  world.launch(maxima);
  for (int i = 0; i < kCount; ++i) {
    for (const int shift : {0, 16}) {
      for (const auto& [part, infinity] : {std::pair(0, kHalf), std::pair(kCount, kBFloat16)}) {
        std::uint32_t& pair = maxima.largest[part + i];
        if ((pair >> shift & 0x7FFFu) > infinity) pair |= 0x7FFFu << shift;
      }
    }
    std::uint32_t& z = maxima.largest[2 * kCount + i];
    if (std::isnan(float_of_bits(z))) z = 0x7FC00000u;
    if ((z & 0x7FFFFFFFu) == 0 && (expected[2 * kCount + i] & 0x7FFFFFFFu) == 0)
      z = expected[2 * kCount + i];
  }
  checks->expect_equal(maxima.largest, expected.data(), 3 * kCount, name);
}

}  // namespace dlattn::test
