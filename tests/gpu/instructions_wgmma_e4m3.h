#pragma once

#include <cuda_fp8.h>

#include "instructions_bytes.h"

// wgmma of e4m3: its operands and registers, and how many bits its accumulators have.
namespace dlattn::test {

// d = a b, of 64 x 128 and 128 x 2 kCount, in swizzled rows of 128 bytes along K.
template <int kCount, bool kRegisters>
struct ByteProduct {
  static constexpr int kThreads = 128, kSteps = 4, kRowBytes = 128;
  const std::uint8_t* image;         // of shared memory from kTileAt on: a, then b
  const std::uint32_t* registers_a;  // [kSteps, 128, 4]
  float* out;                        // [128, kCount], by thread and register

  static constexpr int kBytesA = 64 * kRowBytes, kBytesB = 2 * kCount * kRowBytes;
  int smem_bytes() const { return kTileAt + kBytesA + kBytesB; }
  __device__ void operator()() const {
    const int thread = static_cast<int>(threadIdx.x);
    unsigned char* const tile = ptx::dynamic_smem() + kTileAt;
    for (int i = thread; i < kBytesA + kBytesB; i += kThreads) tile[i] = image[i];
    ptx::fence_proxy_async();
    __syncthreads();
    const std::uint64_t a = ptx::wgmma_descriptor(ptx::smem_address(tile), 0);
    const std::uint64_t b = ptx::wgmma_descriptor(ptx::smem_address(tile + kBytesA), 0);
    float d[kCount];
    for (int i = 0; i < kCount; ++i) d[i] = 1e30f;  // not added to
    std::uint32_t r[kSteps][4];
    for (int step = 0; step < kSteps; ++step) {
      for (int i = 0; i < 4; ++i) r[step][i] = registers_a[(step * 128 + thread) * 4 + i];
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint64_t step_b = ptx::wgmma_advance(b, 32 * step);
      if constexpr (kRegisters) {
        ptx::wgmma_rs<__nv_fp8_e4m3, false>(d, r[step], step_b, step > 0);
      } else {
        ptx::wgmma_ss<__nv_fp8_e4m3, false>(d, ptx::wgmma_advance(a, 32 * step), step_b, step > 0);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    for (int i = 0; i < kCount; ++i) out[thread * kCount + i] = d[i];
  }
};

// a(row, k) and b(n, k) are numbers of e4m3; expected(row, n) is the product's.
template <int kCount, bool kRegisters, typename World, typename A, typename B, typename Expected>
void test_byte_product(World& world, Checks* checks, const std::string& what, A a, B b,
                       Expected expected_of) {
  using Product = ByteProduct<kCount, kRegisters>;
  const std::string name =
      "wgmma e4m3 n " + std::to_string(2 * kCount) + (kRegisters ? ", a in registers" : "") + what;
  if (!checks->wants(name)) return;
  auto* image = world.template allocate<std::uint8_t>(Product::kBytesA + Product::kBytesB);
  const auto byte = [](float x) { return static_cast<std::uint8_t>(nearest_e4m3(x)); };
  for (int k = 0; k < 128; ++k) {
    for (int row = 0; row < 64; ++row) image[swizzled(row * 128 + k, 128)] = byte(a(row, k));
    for (int n = 0; n < 2 * kCount; ++n)
      image[Product::kBytesA + swizzled(n * 128 + k, 128)] = byte(b(n, k));
  }
  auto* registers = world.template allocate<std::uint32_t>(Product::kSteps * 128 * 4);
  for (int i = 0; i < Product::kSteps * 128 * 4; ++i) {
    const int step = i / 512, thread = i / 4 % 128, lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4 + i % 2 * 8;
    const int k = step * 32 + lane % 4 * 4 + i % 4 / 2 * 16;
    registers[i] = 0;
    for (int e = 0; e < 4; ++e)
      registers[i] |= static_cast<std::uint32_t>(byte(a(row, k + e))) << 8 * e;
  }
  const Product product{image, registers, world.template allocate<float>(128 * kCount)};
  std::vector<float> expected(128 * kCount);
  for (int i = 0; i < 128 * kCount; ++i) {
    const int thread = i / kCount, e = i % kCount, lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4 + e / 2 % 2 * 8;
    expected[i] = expected_of(row, e / 4 * 8 + lane % 4 * 2 + e % 2);
  }
  world.launch(product);
  checks->expect_equal(product.out, expected.data(), 128 * kCount, name);
}

template <int kCount, typename World>
void test_byte_products_of(World& world, Checks* checks) {
  const auto a = [](int row, int k) {
    return static_cast<float>((row * 31 + k * 17 + row * k % 7) % 15 - 7);
  };
  const auto b = [](int n, int k) {
    return static_cast<float>((n * 13 + k * 29 + n * k % 11) % 15 - 7);
  };
  const auto exact = [&](int row, int n) {
    float sum = 0.0f;
    for (int k = 0; k < 128; ++k) sum += a(row, k) * b(n, k);
    return sum;
  };
  test_byte_product<kCount, false>(world, checks, "", a, b, exact);
  test_byte_product<kCount, true>(world, checks, "", a, b, exact);
}

// 8192 = 128 * 64 in one product, and smaller ones: beside it, and in later steps beside the
// accumulator, they are cut to whole numbers, toward 0.
template <typename World>
void test_accumulator_bits(World& world, Checks* checks) {
  const auto a = [](int, int k) { return k == 0 ? 128.0f : 1.0f; };
  const auto b = [](int n, int k) {
    if (k == 0) return n % 2 == 0 ? 64.0f : 0.0f;
    const float size = static_cast<float>(n / 4 % 4) * 0.5f;  // 0 to 1.5
    return n / 2 % 2 == 0 ? size : -size;
  };
  const auto cut = [&](int, int n) {
    const float addend = b(n, 1), whole = std::trunc(addend);
    if (n % 2 != 0) return 127.0f * addend;
    // Below 8192 an accumulator has one more bit.
    float sum = 8192.0f + 31.0f * whole;
    for (int step = 1; step < 4; ++step)
      sum += 32.0f * (sum < 8192.0f ? std::trunc(addend * 2.0f) / 2.0f : whole);
    return sum;
  };
  test_byte_product<64, false>(world, checks, ", cut off", a, b, cut);
  test_byte_product<64, true>(world, checks, ", cut off", a, b, cut);
}

template <typename World>
void test_byte_products(World& world, Checks* checks) {
  test_byte_products_of<32>(world, checks);
  test_byte_products_of<64>(world, checks);
  test_byte_products_of<96>(world, checks);
  test_byte_products_of<128>(world, checks);
  test_accumulator_bits(world, checks);
}

}  // namespace dlattn::test
