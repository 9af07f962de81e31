#pragma once

#include <cstdint>

#include "cuda/quantize/key_blocks/traits.h"
#include "cuda/tile/vec.cuh"

// How rows of k and v are read.
namespace dlattn::quantize::key_blocks {

// 8 numbers that lie side by side, two in a register.
using Chunk = tile::Vec<std::uint32_t, kChunk / 2>;

// Number `i` of a chunk of elements T.
template <typename T>
__device__ __forceinline__ float number(const Chunk& chunk, int i) {
  const auto bits = static_cast<std::uint16_t>(chunk.x[i / 2] >> i % 2 * 16);
  T x;
  memcpy(static_cast<void*>(&x), &bits, sizeof x);
  return tile::to_float(x);
}

// The first numbers of a row's last `columns`; zeros beyond them.
template <bool kWhole>
__device__ __forceinline__ Chunk load_chunk(const std::uint16_t* row, int columns) {
  Chunk chunk;
  if (kWhole && columns > 0) return *reinterpret_cast<const Chunk*>(row);
  const auto at = [&](int i) { return !kWhole && i < columns ? std::uint32_t{row[i]} : 0u; };
#pragma unroll
  for (int j = 0; j < kChunk / 2; ++j) chunk.x[j] = at(2 * j) | at(2 * j + 1) << 16;
  return chunk;
}

}  // namespace dlattn::quantize::key_blocks
