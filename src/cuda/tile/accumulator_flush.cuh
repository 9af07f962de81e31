#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/tile/accumulation_limits.h"

// Accumulators of rows that have more keys than one accumulator should add up
// (accumulation_limits.h). After kFlushKeys keys a lane sets the upper 16 bits of each accumulator
// aside, in the row of out, which nobody reads before the results are stored. The rest, less than
// 2^-7 of the accumulator, stays, and the next keys are added to it. The upper halves are taken
// back before the row max is raised, and at the end. Nothing is lost: an accumulator minus its
// upper half is exact.
namespace dlattn::tile {

// The two fp32 numbers whose upper halves are in `word`, and whose lower halves are 0.
__device__ __forceinline__ void unpack_upper(std::uint32_t word, float (&x)[2]) {
  const std::uint32_t bits[2] = {word << 16, word & 0xFFFF0000u};
  memcpy(x, bits, sizeof x);
}

// Stores the upper halves of two accumulators, whatever T is, over two elements of `out`, which are
// aligned to 4 bytes, and leaves the rest in the accumulators.
template <typename T>
__device__ __forceinline__ void flush(float* pair, T* out) {
  static_assert(sizeof(T) == 2);
  std::uint32_t bits[2];
  memcpy(bits, pair, sizeof bits);
  const std::uint32_t word = (bits[0] >> 16) | (bits[1] & 0xFFFF0000u);
  *reinterpret_cast<std::uint32_t*>(out) = word;
  float upper[2];
  unpack_upper(word, upper);
  // Infinity minus its upper half is NaN. fminf makes a number of that, so that infinity is what is
  // taken back. No other rest is as large as that number.
  for (int i = 0; i < 2; ++i) pair[i] = fminf(pair[i] - upper[i], 0x1p121f);
}

template <typename T>
__device__ __forceinline__ void restore(float* pair, const T* out) {
  static_assert(sizeof(T) == 2);
  float upper[2];
  unpack_upper(*reinterpret_cast<const std::uint32_t*>(out), upper);
  // seed: restore-flushed
  for (int i = 0; i < 2; ++i) pair[i] += upper[i];
}

// Calls move(pair, out) for a lane's accumulators of kRows rows. The lane has two of every 8
// columns: accumulators(r, j) are row r's in columns 8 j to 8 j + 7. out[r] points to the lane's
// first column in row r, or is null if there is no such row. `columns`: how many exist from there
// on, an even number.
template <int kHeadDim, typename T, int kRows, typename Accumulators, typename Move>
__device__ __forceinline__ void move_quad_rows(T* const (&out)[kRows], int columns,
                                               Accumulators accumulators, Move move) {
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
    if (8 * j >= columns) break;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (out[r]) move(accumulators(r, j), out[r] + 8 * j);
    }
  }
}

}  // namespace dlattn::tile
