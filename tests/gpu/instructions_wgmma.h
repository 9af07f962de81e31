#pragma once

#include "instructions.h"
#include "instructions_bytes.h"
#include "instructions_mma8.h"
#include "instructions_wgmma_e4m3.h"

// wgmma's operands, registers, groups and descriptors.
namespace dlattn::test {

// How a matrix of `rows` (M or N) by kDepth elements lies in shared memory, and how a descriptor
// says so.
constexpr int kDepth = 128;
constexpr int kSteps = kDepth / 16;
struct Layout {
  int rows;
  bool mn_major;
  int span;  // bytes of a swizzled row: 128, 64, 32; 0: no swizzle

  // Byte of an element.
  int offset(int row, int k) const {
    const int along = mn_major ? row : k, across = mn_major ? k : row;
    const int depth = mn_major ? kDepth : rows;  // rows of a block
    if (span == 0) return along / 8 * depth * 16 + across * 16 + along % 8 * 2;
    const int width = span / 2;
    return along / width * depth * span + swizzled(across * span + along % width * 2, span);
  }
  int bytes() const {
    const int width = mn_major && span ? span / 2 : 1;  // whole blocks
    return (rows + width - 1) / width * width * kDepth * 2;
  }
  // The offset of the operand of step `step` from the tile's start.
  int advance(int step) const {
    if (mn_major) return step * 16 * (span ? span : 16);
    if (span == 0) return step * 2 * rows * 16;
    return step * 16 / (span / 2) * rows * span + step * 16 % (span / 2) * 2;
  }
  std::uint64_t descriptor(std::uint32_t address) const {
    const int block = (mn_major ? kDepth : rows) * (span ? span : 16);
    std::uint64_t mode = span == 128 ? 1 : span == 64 ? 2 : span == 32 ? 3 : 0;
    std::uint64_t leading = block, stride = 8 * span;
    if (span == 0) leading = mn_major ? 128 : block, stride = mn_major ? block : 128;
    return mode << 62 | stride >> 4 << 32 | leading >> 4 << 16 | address >> 4;
  }
};

// out = a b, of 64 x kDepth and kDepth x 2 kCount.
template <typename T, int kCount, bool kTransposeB, bool kRegisters>
struct Product {
  static constexpr int kThreads = 128;
  const std::uint16_t* image;  // of shared memory from kTileAt on: a, then b
  int bytes_a, bytes_b;
  std::uint64_t descriptor_a, descriptor_b;  // with an address of 0
  int advance_a[kSteps], advance_b[kSteps];
  const std::uint32_t* registers_a;  // [kSteps, 128, 4]
  float* out;                        // [128, kCount], by thread and register

  int smem_bytes() const { return kTileAt + bytes_a + bytes_b; }
  __device__ void operator()() const {
    const int thread = static_cast<int>(threadIdx.x);
    auto* tile = reinterpret_cast<std::uint16_t*>(ptx::dynamic_smem() + kTileAt);
    for (int i = thread; i < (bytes_a + bytes_b) / 2; i += kThreads) tile[i] = image[i];
    ptx::fence_proxy_async();
    __syncthreads();
    const ptx::SmemAddress at = ptx::smem_address(tile);
    const std::uint64_t a = descriptor_a + (at >> 4);
    const std::uint64_t b = descriptor_b + ((at + bytes_a) >> 4);
    float d[kCount];
    for (int i = 0; i < kCount; ++i) d[i] = 1e30f;  // not added to
    std::uint32_t r[kSteps][4];
    for (int step = 0; step < kSteps; ++step) {
      for (int i = 0; i < 4; ++i) r[step][i] = registers_a[(step * 128 + thread) * 4 + i];
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint64_t step_b = ptx::wgmma_advance(b, advance_b[step]);
      if constexpr (kRegisters) {
        ptx::wgmma_rs<T, kTransposeB>(d, r[step], step_b, step > 0);
      } else {
        ptx::wgmma_ss<T, kTransposeB>(d, ptx::wgmma_advance(a, advance_a[step]), step_b, step > 0);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    for (int i = 0; i < kCount; ++i) out[thread * kCount + i] = d[i];
  }
};

template <typename T>
T small_number(int i) {
  return static_cast<T>(static_cast<float>(i % 15 - 7));
}
template <typename T>
std::uint16_t bits_of(T x) {
  std::uint16_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

template <typename T, int kCount, bool kTransposeB, bool kRegisters, typename World>
void test_product(World& world, Checks* checks, int span) {
  constexpr int kN = 2 * kCount;
  const std::string name = "wgmma n " + std::to_string(kN) + (kTransposeB ? ", b along n" : "") +
                           (kRegisters ? ", a in registers" : "") + ", rows of " +
                           std::to_string(span) + " bytes";
  if (!checks->wants(name)) return;
  const Layout layout_a{64, false, span}, layout_b{kN, kTransposeB, span};
  const auto a = [](int row, int k) { return small_number<T>(row * 31 + k * 17 + row * k % 7); };
  const auto b = [](int n, int k) { return small_number<T>(n * 13 + k * 29 + n * k % 11); };
  const int count = (layout_a.bytes() + layout_b.bytes()) / 2;
  auto* image = world.template allocate<std::uint16_t>(count);
  for (int k = 0; k < kDepth; ++k) {
    for (int row = 0; row < 64; ++row) image[layout_a.offset(row, k) / 2] = bits_of(a(row, k));
    for (int n = 0; n < kN; ++n)
      image[(layout_a.bytes() + layout_b.offset(n, k)) / 2] = bits_of(b(n, k));
  }
  auto* registers = world.template allocate<std::uint32_t>(kSteps * 128 * 4);
  for (int i = 0; i < kSteps * 128 * 4; ++i) {
    const int step = i / 512, thread = i / 4 % 128, lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4 + i % 2 * 8;
    const int k = step * 16 + lane % 4 * 2 + i % 4 / 2 * 8;
    registers[i] = static_cast<std::uint32_t>(bits_of(a(row, k + 1))) << 16 | bits_of(a(row, k));
  }
  Product<T, kCount, kTransposeB, kRegisters> product{};
  product.image = image;
  product.bytes_a = layout_a.bytes();
  product.bytes_b = layout_b.bytes();
  product.descriptor_a = layout_a.descriptor(0);
  product.descriptor_b = layout_b.descriptor(0);
  product.registers_a = registers;
  product.out = world.template allocate<float>(128 * kCount);
  for (int step = 0; step < kSteps; ++step) {
    product.advance_a[step] = layout_a.advance(step);
    product.advance_b[step] = layout_b.advance(step);
  }
  std::vector<float> expected(128 * kCount);
  for (int i = 0; i < 128 * kCount; ++i) {
    const int thread = i / kCount, e = i % kCount, lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4 + e / 2 % 2 * 8;
    const int n = e / 4 * 8 + lane % 4 * 2 + e % 2;
    for (int k = 0; k < kDepth; ++k)
      expected[i] += static_cast<float>(a(row, k)) * static_cast<float>(b(n, k));
  }
  world.launch(product);
  checks->expect_equal(product.out, expected.data(), 128 * kCount, name);
}

// Two groups in flight at once: s = a b, and o += p b with p in registers; s is used while o runs.
struct TwoGroups {
  static constexpr int kThreads = 128;
  float* out;  // [128, 32 + 32]

  int smem_bytes() const { return kTileAt + 2 * 64 * 128; }
  __device__ void operator()() const {
    const int thread = static_cast<int>(threadIdx.x);
    auto* tile = reinterpret_cast<half*>(ptx::dynamic_smem() + kTileAt);
    // a(row, k) = row % 4 + 1 where k = row, b(n, k) = n % 8 where k <= n; both 64 x 64, in rows of
    // k.
    for (int i = thread; i < 64 * 64; i += kThreads) {
      const int row = i / 64, k = i % 64;
      const int at = (row * 128 + k * 2) ^ (row % 8 * 16);
      tile[at / 2] = __float2half(row == k ? static_cast<float>(row % 4 + 1) : 0.0f);
      tile[64 * 64 + at / 2] = __float2half(k <= row ? static_cast<float>(row % 8) : 0.0f);
    }
    ptx::fence_proxy_async();
    __syncthreads();
    const std::uint64_t a = ptx::wgmma_descriptor(ptx::smem_address(tile), 0);
    const std::uint64_t b = ptx::wgmma_descriptor(ptx::smem_address(tile + 64 * 64), 0);
    float s[32], o[32];
    std::uint32_t p[4][4];
    for (int i = 0; i < 32; ++i) o[i] = 3.0f;
    for (int i = 0; i < 16; ++i) p[i / 4][i % 4] = 0x3C003C00u;  // ones
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      ptx::wgmma_ss<half, false>(s, ptx::wgmma_advance(a, 32 * k), ptx::wgmma_advance(b, 32 * k),
                                 k > 0);
    ptx::wgmma_commit();
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      ptx::wgmma_rs<half, false>(o, p[k], ptx::wgmma_advance(b, 32 * k), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    for (int i = 0; i < 32; ++i) out[thread * 64 + i] = s[i];
    ptx::wgmma_wait<0>();
    for (int i = 0; i < 32; ++i) out[thread * 64 + 32 + i] = o[i];
  }
};

template <typename World>
void test_two_groups(World& world, Checks* checks) {
  const char* const name = "wgmma, two groups";
  if (!checks->wants(name)) return;
  TwoGroups groups{world.template allocate<float>(128 * 64)};
  std::vector<float> expected(128 * 64);
  for (int i = 0; i < 128 * 32; ++i) {
    const int thread = i / 32, e = i % 32, lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4 + e / 2 % 2 * 8;
    const int n = e / 4 * 8 + lane % 4 * 2 + e % 2;
    expected[thread * 64 + e] = row <= n ? static_cast<float>((row % 4 + 1) * (n % 8)) : 0.0f;
    expected[thread * 64 + 32 + e] = 3.0f + static_cast<float>(n % 8 * (n + 1));
  }
  world.launch(groups);
  checks->expect_equal(groups.out, expected.data(), 128 * 64, name);
}

template <int kCount, typename World>
void test_products_of(World& world, Checks* checks) {
  test_product<half, kCount, false, false>(world, checks, 128);
  test_product<half, kCount, true, false>(world, checks, 128);
  test_product<__nv_bfloat16, kCount, false, true>(world, checks, 128);
  test_product<__nv_bfloat16, kCount, true, true>(world, checks, 128);
}

template <typename World>
int test_instructions(World& world, const char* filter) {
  Checks checks(filter);
  test_bulk_copies(world, &checks);
  test_ring(world, &checks);
  test_matrices(world, &checks);
  test_conversions(world, &checks);
  test_integer_conversions(world, &checks);
  test_permutations(world, &checks);
  test_maxima(world, &checks);
  test_bytes(world, &checks);
  test_products_of<32>(world, &checks);
  test_products_of<48>(world, &checks);
  test_products_of<64>(world, &checks);
  test_products_of<96>(world, &checks);
  test_products_of<128>(world, &checks);
  test_product<half, 64, true, true>(world, &checks, 128);
  test_product<__nv_bfloat16, 64, true, false>(world, &checks, 128);
  for (const int span : {64, 32, 0}) {
    test_product<half, 64, false, false>(world, &checks, span);
    test_product<half, 64, true, false>(world, &checks, span);
  }
  test_two_groups(world, &checks);
  test_byte_products(world, &checks);
  return checks.finish();
}

}  // namespace dlattn::test
