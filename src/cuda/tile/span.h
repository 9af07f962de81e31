#pragma once

#include <cstdint>

// How many keys of a row products with V add up in one go, as plain constexpr host code: the plan
// reads the same numbers as the kernels. Tensor cores add to an accumulator by cutting off what its
// last place does not hold: where all of V has one sign, a row of a million keys loses nearly 1%
// that way, of 65,536 0.05%.
namespace dlattn::tile {

// After so many what has been accumulated is set aside (aside.cuh). DLATTN_SPAN_KEYS is for tests
// on rows that are not so long.
#ifdef DLATTN_SPAN_KEYS
constexpr int kSpanKeys = DLATTN_SPAN_KEYS;
#else
constexpr int kSpanKeys = 65536;
#endif

// The same in tiles of so many keys, a power of two.
constexpr int span_tiles(int block_n) {
  int tiles = 1;
  while (2 * tiles * block_n <= kSpanKeys) tiles *= 2;
  return tiles;
}

// The most that kernels which set nothing aside take for an accumulator.
constexpr std::int64_t kMostKeys = 131072;

}  // namespace dlattn::tile
