#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/elements.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/permute.cuh"

// Keys of 8 bits as factors of products of fp16, which every int8 and e4m3 is exactly, and rows of
// Q beside them.
namespace dlattn::tile {

// Four bytes of a register as two pairs of fp16.
template <typename Byte>
struct Unpack;

template <>
struct Unpack<std::int8_t> {
  // Bytes 0 and 1, and bytes 2 and 3.
  __device__ __forceinline__ static void halves(std::uint32_t packed, std::uint32_t* low,
                                                std::uint32_t* high) {
    *low = two<0x4140>(packed);
    *high = two<0x4342>(packed);
  }
  // Bytes 0 and 2, and bytes 1 and 3.
  __device__ __forceinline__ static void alternating(std::uint32_t packed, std::uint32_t* even,
                                                     std::uint32_t* odd) {
    *even = two<0x4240>(packed);
    *odd = two<0x4341>(packed);
  }

 private:
  // The two bytes that a selector has beside 4's. x + 128 is the fraction of an fp16 from 1024 on.
  template <int kSelector>
  __device__ __forceinline__ static std::uint32_t two(std::uint32_t packed) {
    constexpr std::uint32_t k1024 = 0x64646464u, k1152 = 0x64806480u;
    return ptx::subtract_halves(ptx::permute_bytes<kSelector>(packed ^ 0x80808080u, k1024), k1152);
  }
};

template <>
struct Unpack<__nv_fp8_e4m3> {
  __device__ __forceinline__ static void halves(std::uint32_t packed, std::uint32_t* low,
                                                std::uint32_t* high) {
    ptx::convert_e4m3x4_to_half(packed, low, high);
  }
  __device__ __forceinline__ static void alternating(std::uint32_t packed, std::uint32_t* even,
                                                     std::uint32_t* odd) {
    ptx::convert_e4m3x4_to_half(ptx::permute_bytes<0x3120>(packed, packed), even, odd);
  }
};

// How rows of bfloat16 become fp16: what an element is multiplied with, and what products with the
// results are multiplied with in turn. The largest magnitude of a row is from 2^14 to 2^15 then:
// what fp16 rounds is below 2^-39 of it.
struct HalfScale {
  float of_elements, of_products;

  // For elements of at most such a magnitude.
  __device__ __forceinline__ explicit HalfScale(float largest) {
    std::uint32_t bits;
    memcpy(&bits, &largest, sizeof bits);
    // Within what both powers are normal numbers for.
    const int exponent = max(min(static_cast<int>(bits >> 23) - 127, 127), -100);
    of_elements = power_of_two(14 - exponent);
    of_products = power_of_two(exponent - 14);
  }

 private:
  __device__ __forceinline__ static float power_of_two(int exponent) {
    const std::uint32_t bits = static_cast<std::uint32_t>(127 + exponent) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
  }
};

}  // namespace dlattn::tile
