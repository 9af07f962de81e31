#pragma once

#include "cuda/ptx/smem.cuh"
#include "cuda/tile/byte_factors.cuh"
#include "cuda/tile/swizzle.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

// Query rows for products with K of 8 bits, in shared memory as fp16.
//
// Lane c of a quad multiplies columns 4 c to 4 c + 3 of 16; they stand where operand a has columns
// 2 c, 2 c + 1, 8 + 2 c and 9 + 2 c. Rows of bfloat16 are scaled by a power of two, so that the
// largest magnitude of each is from 2^14 to 2^15: what fp16 rounds then is below 2^-39 of it.
namespace dlattn::decode {

using tile::HalfScale;

template <int kHeadDim>
class ByteQueries {
 public:
  static constexpr int kChunks = kHeadDim / 8;  // of 16 bytes, of a row

  // Stores the row of which kChunks consecutive lanes have a chunk each, and what its products
  // count with keys of which an element counts `of_keys`. All lanes of the warp call it.
  template <typename T>
  __device__ __forceinline__ static void store(unsigned char* rows, float* scales, int row,
                                               int chunk, const tile::Vec<T, 8>& x, float of_keys) {
    std::uint32_t words[4];
    float scale = 1.0f;
    if constexpr (std::is_same_v<T, __half>) {
      memcpy(words, x.x, sizeof words);
    } else {
      scale = to_half(x, words);
    }
    if (chunk == 0) scales[row] = scale * of_keys;
    unsigned char* const low = rows + Rows::offset(row, chunk - chunk % 2) + chunk % 2 * 8;
    unsigned char* const high = rows + Rows::offset(row, chunk - chunk % 2 + 1) + chunk % 2 * 8;
    *reinterpret_cast<Words*>(low) = {words[0], words[2]};
    *reinterpret_cast<Words*>(high) = {words[1], words[3]};
  }

 private:
  using Rows = tile::SwizzledRows<kHeadDim>;
  using Words = tile::Vec<std::uint32_t, 2>;

  // Returns what an element counts.
  template <typename T>
  __device__ __forceinline__ static float to_half(const tile::Vec<T, 8>& x,
                                                  std::uint32_t (&words)[4]) {
    float numbers[8], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      numbers[i] = tile::to_float(x.x[i]);
      largest = fmaxf(largest, fabsf(numbers[i]));
    }
#pragma unroll
    for (int step = 1; step < kChunks; step *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(tile::kFullMask, largest, step));
    const HalfScale scale(largest);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = tile::pack<__half>(numbers[2 * i] * scale.of_elements,
                                    numbers[2 * i + 1] * scale.of_elements);
    }
    return scale.of_products;
  }
};

}  // namespace dlattn::decode
