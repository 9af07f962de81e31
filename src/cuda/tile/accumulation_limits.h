#pragma once

#include <cstdint>

// How many keys of a row one accumulator of a product with V adds up, as plain constexpr host code:
// the plan reads the same numbers as the kernels. Tensor cores add to an accumulator by cutting off
// what its last place does not hold: where all of V has one sign, a row of a million keys loses
// nearly 1% that way, of 65,536 0.05%.
namespace dlattn::tile {

// After so many keys the accumulators are set aside (accumulator_flush.cuh): before the loss is a
// rounding to float16, half of 2^-10. DLATTN_FLUSH_KEYS is for tests on rows that are not so long.
#ifdef DLATTN_FLUSH_KEYS
constexpr int kFlushKeys = DLATTN_FLUSH_KEYS;
constexpr bool kShortRuns = true;
#else
constexpr int kFlushKeys = 16384;
constexpr bool kShortRuns = false;
#endif

// The same in tiles of so many keys, a power of two.
constexpr int flush_tiles(int block_n) {
  int tiles = 1;
  while (2 * tiles * block_n <= kFlushKeys) tiles *= 2;
  return tiles;
}

// The most keys that kernels which set nothing aside accept for an accumulator.
constexpr std::int64_t kMostKeys = 131072;

// CUDA cores round to nearest instead, so that errors cancel, but not where every product is the
// same: P and V are constant. Their kernels add up rows of more keys than this in runs
// (totals.cuh), earlier where float32 would show it.
constexpr int one_run_keys(int element_bytes) {
  if (kShortRuns) return 128;
  return element_bytes == 4 ? 512 : 16384;
}

// The keys of a run, a power of two: so many that the runs of a row are not many more.
constexpr int run_keys(int seqlen_k) {
  if (kShortRuns) return 64;
  return seqlen_k > 65536 ? 1024 : 256;
}

// Bytes of shared memory that this takes of a thread block.
constexpr int totals_bytes(int element_bytes, std::int64_t seqlen_k, int rows, int columns) {
  return seqlen_k > one_run_keys(element_bytes) ? rows * columns * 4 : 0;
}

}  // namespace dlattn::tile
