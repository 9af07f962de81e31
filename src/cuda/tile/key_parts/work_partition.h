#pragma once

#include <cstdint>

#include "core/util/inline.h"
#include "cuda/tile/divider.h"

// How row blocks are divided among thread blocks, decided by the host where it knows all lengths,
// else by every thread block alike.
namespace dlattn::tile::key_parts {

// The tiles' time that it takes to begin a row block, some 256 keys'.
constexpr int fixed_overhead_tiles(int block_n) {
  return 256 / block_n;
}

// The tiles of a part if row blocks are to be divided into parts of one size, a thread block each;
// 0 if tiles are to be given out one by one. For row blocks with `tiles` in all and at most `most`
// each.
//
// Parts of one size, as many of each row block as there are thread blocks for, end after the
// longest; tiles given out one by one after as many as any thread block has, but then most thread
// blocks have pieces of two row blocks, and begin twice.
DLATTN_SHARED int part_tiles(const Divider& blocks, unsigned begin, unsigned row_blocks,
                             unsigned tiles, unsigned most) {
  const unsigned num_blocks = blocks.divisor();
  if (row_blocks == 0) return 0;
  unsigned each = most, rounds = 1;
  if (row_blocks <= num_blocks) {
    const unsigned parts = num_blocks / row_blocks;
    each = (most + parts - 1) / parts;
  } else {
    rounds = blocks.quotient(row_blocks + num_blocks - 1);
  }
  // rounds * (each + begin) <= (tiles + row_blocks * begin) / num_blocks + begin, or 1/16 more: to
  // deal tiles takes each thread block its time too.
  unsigned by_parts = rounds * (each + begin) - begin;
  by_parts -= by_parts / 16;
  const std::uint64_t of_all = std::uint64_t{by_parts} * num_blocks;
  return of_all <= tiles + row_blocks * begin ? static_cast<int>(each) : 0;
}

}  // namespace dlattn::tile::key_parts
