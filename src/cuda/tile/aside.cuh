#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/tile/span.h"

// Rows of more keys than should be added up in one go (span.h). After so many, what the
// accumulators have is set aside, where the row's results will stand, in 16 bits, and the rest of
// it, less than 2^-7 of it, stays and gathers the next ones. It is taken back before the row's
// reference is raised, and at the end. Nothing is lost: an accumulator less its upper half is
// exact.
namespace dlattn::tile {

// The two numbers whose upper halves these are.
__device__ __forceinline__ void unpack_upper(std::uint32_t word, float (&x)[2]) {
  const std::uint32_t bits[2] = {word << 16, word & 0xFFFF0000u};
  memcpy(x, bits, sizeof x);
}

// Leaves the upper halves of two accumulators, whatever T is, in `place`, two elements that are
// aligned to 4 bytes.
template <typename T>
__device__ __forceinline__ void set_aside(float* pair, T* place) {
  static_assert(sizeof(T) == 2);
  std::uint32_t bits[2];
  memcpy(bits, pair, sizeof bits);
  const std::uint32_t word = (bits[0] >> 16) | (bits[1] & 0xFFFF0000u);
  *reinterpret_cast<std::uint32_t*>(place) = word;
  float upper[2];
  unpack_upper(word, upper);
  // What is left of infinity is NaN; any number is as well, and does not hide what is set aside.
  // No other rest is this large.
  for (int i = 0; i < 2; ++i) pair[i] = fminf(pair[i] - upper[i], 0x1p121f);
}

template <typename T>
__device__ __forceinline__ void take_back(float* pair, const T* place) {
  static_assert(sizeof(T) == 2);
  float upper[2];
  unpack_upper(*reinterpret_cast<const std::uint32_t*>(place), upper);
  for (int i = 0; i < 2; ++i) pair[i] += upper[i];
}

// Calls move(pair, place) for a lane's accumulators of kRows rows, of which it has two of every 8
// columns: accumulators(r, j) those of row r's 8 j and the next. out[r] is the row's place from the
// lane's first column on, null if there is no such row; of `columns`, an even number from there on.
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
