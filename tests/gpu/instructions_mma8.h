#pragma once

#include <cuda_fp16.h>

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma8.cuh"
#include "instructions.h"
#include "instructions_bytes.h"

// mma of bytes, and how its operands come from rows of bytes in shared memory without a shuffle.
// All numbers are integers that every accumulator holds exactly: of these instructions some GPUs
// compute some by others.
namespace dlattn::test {

constexpr int kByteDepth = 32;

// d = c + a b of 16 x 32 and 32 x 8 bytes, given by lane and register.
template <bool kSigned>
struct ByteProducts {
  static constexpr int kThreads = 32;
  using Accumulator = std::conditional_t<kSigned, std::int32_t, float>;
  const std::uint32_t *a, *b;  // [32, 4], [32, 2]
  const Accumulator* c;        // [32, 4]
  Accumulator* d;

  int smem_bytes() const { return 16; }
  __device__ void operator()() const {
    const int lane = static_cast<int>(threadIdx.x);
    std::uint32_t r[4];
    Accumulator sum[4];
    for (int i = 0; i < 4; ++i) r[i] = a[lane * 4 + i], sum[i] = c[lane * 4 + i];
    if constexpr (kSigned) {
      ptx::mma_s8(sum, r, b[lane * 2], b[lane * 2 + 1]);
    } else {
      ptx::mma_e4m3(sum, r, b[lane * 2], b[lane * 2 + 1]);
    }
    for (int i = 0; i < 4; ++i) d[lane * 4 + i] = sum[i];
  }
};

template <bool kSigned, typename World>
void test_byte_products(World& world, Checks* checks) {
  const char* const name = kSigned ? "mma of signed bytes" : "mma of e4m3";
  if (!checks->wants(name)) return;
  using Product = ByteProducts<kSigned>;
  using Accumulator = typename Product::Accumulator;
  // Signed bytes of any size; of e4m3 small ones, whose sums need few bits.
  const auto number = [](int i) { return kSigned ? i * 37 % 256 - 128 : i * 7 % 13 - 6; };
  const auto a = [&](int row, int k) { return number(row * 31 + k * 17 + row * k % 7); };
  const auto b = [&](int k, int n) { return number(n * 13 + k * 29 + n * k % 11 + 5); };
  const auto byte = [](int x) {
    return static_cast<std::uint32_t>(kSigned ? x & 0xFF : nearest_e4m3(static_cast<float>(x)));
  };
  auto* registers_a = world.template allocate<std::uint32_t>(32 * 4);
  auto* registers_b = world.template allocate<std::uint32_t>(32 * 2);
  auto* c = world.template allocate<Accumulator>(32 * 4);
  auto* d = world.template allocate<Accumulator>(32 * 4);
  std::memset(registers_a, 0, 32 * 4 * 4), std::memset(registers_b, 0, 32 * 2 * 4);
  std::vector<Accumulator> expected(32 * 4);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int e = 0; e < 16; ++e) {
      const int k = 4 * t + e % 4 + e / 8 * 16;
      registers_a[lane * 4 + e / 4] |= byte(a(g + e / 4 % 2 * 8, k)) << e % 4 * 8;
      if (e < 8)
        registers_b[lane * 2 + e / 4] |= byte(b(4 * t + e % 4 + e / 4 * 16, g)) << e % 4 * 8;
    }
    for (int e = 0; e < 4; ++e) {
      int sum = 10 * lane + e;
      c[lane * 4 + e] = static_cast<Accumulator>(sum);
      for (int k = 0; k < kByteDepth; ++k) sum += a(g + e / 2 * 8, k) * b(k, 2 * t + e % 2);
      expected[lane * 4 + e] = static_cast<Accumulator>(sum);
    }
  }
  world.launch(Product{registers_a, registers_b, c, d});
  checks->expect_equal(d, expected.data(), 32 * 4, name);
}

// The same of e4m3 into pairs of fp16, which hold these sums exactly.
struct HalfSumProducts {
  static constexpr int kThreads = 32;
  const std::uint32_t *a, *b;  // [32, 4], [32, 2]
  const std::uint32_t* c;      // [32, 2]
  std::uint32_t* d;

  int smem_bytes() const { return 16; }
  __device__ void operator()() const {
    const int lane = static_cast<int>(threadIdx.x);
    std::uint32_t r[4], sum[2];
    for (int i = 0; i < 4; ++i) r[i] = a[lane * 4 + i];
    for (int i = 0; i < 2; ++i) sum[i] = c[lane * 2 + i];
    ptx::mma_e4m3(sum, r, b[lane * 2], b[lane * 2 + 1]);
    for (int i = 0; i < 2; ++i) d[lane * 2 + i] = sum[i];
  }
};

template <typename World>
void test_half_sums(World& world, Checks* checks) {
  const char* const name = "mma of e4m3 into fp16";
  if (!checks->wants(name)) return;
  const auto a = [](int row, int k) { return (row * 31 + k * 17 + row * k % 7) * 7 % 13 - 6; };
  const auto b = [](int k, int n) { return (n * 13 + k * 29 + n * k % 11 + 5) * 7 % 13 - 6; };
  const auto byte = [](int x) {
    return static_cast<std::uint32_t>(nearest_e4m3(static_cast<float>(x)));
  };
  const auto half_bits = [](int x) {
    return std::uint32_t{__half_raw(__float2half_rn(static_cast<float>(x))).x};
  };
  auto* registers_a = world.template allocate<std::uint32_t>(32 * 4);
  auto* registers_b = world.template allocate<std::uint32_t>(32 * 2);
  auto* c = world.template allocate<std::uint32_t>(32 * 2);
  auto* d = world.template allocate<std::uint32_t>(32 * 2);
  std::memset(registers_a, 0, 32 * 4 * 4), std::memset(registers_b, 0, 32 * 2 * 4);
  std::memset(c, 0, 32 * 2 * 4);
  std::vector<std::uint32_t> expected(32 * 2);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int e = 0; e < 16; ++e) {
      const int k = 4 * t + e % 4 + e / 8 * 16;
      registers_a[lane * 4 + e / 4] |= byte(a(g + e / 4 % 2 * 8, k)) << e % 4 * 8;
      if (e < 8)
        registers_b[lane * 2 + e / 4] |= byte(b(4 * t + e % 4 + e / 4 * 16, g)) << e % 4 * 8;
    }
    for (int e = 0; e < 4; ++e) {
      int sum = 10 * lane + e;
      c[lane * 2 + e / 2] |= half_bits(sum) << e % 2 * 16;
      for (int k = 0; k < kByteDepth; ++k) sum += a(g + e / 2 * 8, k) * b(k, 2 * t + e % 2);
      expected[lane * 2 + e / 2] |= half_bits(sum) << e % 2 * 16;
    }
  }
  world.launch(HalfSumProducts{registers_a, registers_b, c, d});
  checks->expect_equal(d, expected.data(), 32 * 2, name);
}

// S = Q K^T and O = S V by one warp, of 16 rows, 32 keys, 32 columns of Q and K and 16 of V. Rows
// of bytes lie in shared memory as they do in global memory.
// - Q and K: ldmatrix takes two bytes for an element of 16 bits, and delivers a and b.
// - S: two accumulators of two products, 8 keys apart, become a register of a. The k of this
//   operand is not in the order of the keys: k = 4 t + (0, 1, 2, 3) of 16 are 2 t + (0, 1, 8, 9).
// - V: transposed as if its elements had 16 bits, a register holds keys 2 t and 2 t + 1 of columns
//   2 g and 2 g + 1. The even bytes of two registers, 8 keys apart, are b of the even columns in
//   just that order, the odd ones b of the odd columns. So a lane has columns 4 t to 4 t + 3 of O.
struct ByteAttention {
  static constexpr int kThreads = 32, kPitch = 32;  // bytes from row to row
  const std::uint8_t *q, *k, *v;                    // [16, 32], [32, 32], [32, 16], numbers of e4m3
  float* out;                                       // [16, 16]

  int smem_bytes() const { return (16 + 32 + 32) * kPitch; }
  __device__ void operator()() const {
    const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
    unsigned char* smem = ptx::dynamic_smem();
    for (int i = lane; i < 32 * 32; i += 32) {
      if (i < 16 * 32) smem[i] = q[i];
      smem[16 * kPitch + i] = k[i];
      if (i < 32 * 16) smem[48 * kPitch + i / 16 * kPitch + i % 16] = v[i];
    }
    __syncwarp();
    const ptx::SmemAddress sQ = ptx::smem_address(smem);
    const ptx::SmemAddress sK = sQ + 16 * kPitch, sV = sK + 32 * kPitch;
    std::uint32_t rQ[4], rP[4], rV[4];
    ptx::ldmatrix_x4(rQ, sQ + lane % 16 * kPitch + lane / 16 * 16);
    float s[4][4] = {};
    for (int n = 0; n < 32; n += 16) {
      std::uint32_t rK[4];
      ptx::ldmatrix_x4(rK, sK + (n + lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16);
      ptx::mma_e4m3(s[n / 8], rQ, rK[0], rK[1]);
      ptx::mma_e4m3(s[n / 8 + 1], rQ, rK[2], rK[3]);
    }
    for (int i = 0; i < 4; ++i) {
      const float *first = s[i / 2 * 2] + i % 2 * 2, *second = s[i / 2 * 2 + 1] + i % 2 * 2;
      rP[i] = ptx::convert_e4m3x4(first[0], first[1], second[0], second[1]);
    }
    ptx::ldmatrix_x4_trans(rV, sV + lane * kPitch);
    float even[4] = {}, odd[4] = {};
    ptx::mma_e4m3(even, rP, ptx::permute_bytes<0x6420>(rV[0], rV[1]),
                  ptx::permute_bytes<0x6420>(rV[2], rV[3]));
    ptx::mma_e4m3(odd, rP, ptx::permute_bytes<0x7531>(rV[0], rV[1]),
                  ptx::permute_bytes<0x7531>(rV[2], rV[3]));
    for (int e = 0; e < 4; ++e) {
      float* to = out + (g + e / 2 * 8) * 16 + 4 * t + e % 2 * 2;
      to[0] = even[e], to[1] = odd[e];
    }
  }
};

template <typename World>
void test_byte_attention(World& world, Checks* checks) {
  const char* const name = "attention of e4m3 without shuffles";
  if (!checks->wants(name)) return;
  // Each row of Q has two elements, so that S is small enough for e4m3 to hold it.
  const auto q = [](int i, int d) { return d == i ? 1 : d == (5 * i + 17) % 32 ? 2 : 0; };
  const auto k = [](int j, int d) { return (j * 5 + d * 3 + j * d) % 6; };
  const auto v = [](int j, int d) { return (j * 7 + d * 5 + j * d % 5) % 15 - 7; };
  const auto bytes = [&](int rows, int columns, const auto& number) {
    auto* to = world.template allocate<std::uint8_t>(rows * columns);
    for (int i = 0; i < rows * columns; ++i) {
      to[i] = static_cast<std::uint8_t>(
          nearest_e4m3(static_cast<float>(number(i / columns, i % columns))));
    }
    return to;
  };
  const ByteAttention attention{bytes(16, 32, q), bytes(32, 32, k), bytes(32, 16, v),
                                world.template allocate<float>(16 * 16)};
  std::vector<float> expected(16 * 16);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 32; ++j) {
      int score = 0;
      for (int d = 0; d < 32; ++d) score += q(i, d) * k(j, d);
      for (int d = 0; d < 16; ++d) expected[i * 16 + d] += static_cast<float>(score * v(j, d));
    }
  }
  world.launch(attention);
  checks->expect_equal(attention.out, expected.data(), 16 * 16, name);
}

template <typename World>
void test_bytes(World& world, Checks* checks) {
  test_byte_products<false>(world, checks);
  test_byte_products<true>(world, checks);
  test_half_sums(world, checks);
  test_byte_attention(world, checks);
}

}  // namespace dlattn::test
