#pragma once

#include "cuda/plan/launch_shape.h"

// Which tiles of query rows there are, and in which order thread blocks take them.
namespace dlattn::tile {

// Query rows m_block * kBlockM and on, of one head of one sequence.
struct WorkTile {
  int m_block;
  int head;   // of q
  int batch;  // the sequence
};

// Tile `index` of num_m_blocks of each head, in the order of a one-dimensional grid, which no
// problem outgrows: row blocks vary fastest, so that blocks running side by side read the same
// keys, then heads, then batch entries. Longest first, a few heads are walked together, or all of
// them, their last row blocks before the ones before those: then the grid ends with the short
// blocks of all of them. `Shape`: LaunchShape, or what has the members of it that are needed.
template <typename Shape>
__device__ __forceinline__ WorkTile scheduled_tile(const Shape& shape, unsigned index) {
  const unsigned m_blocks = shape.num_m_blocks.divisor();
  unsigned head = shape.num_m_blocks.quotient(index);  // of all batch entries
  unsigned m_block = index - head * m_blocks;
  if (shape.longest_first) {
    // seed: first-head
    const unsigned first_head = min(head / kHeadsTogether * kHeadsTogether, shape.heads_in_groups);
    const unsigned within = index - first_head * m_blocks;
    const bool all = first_head < shape.heads_in_groups;
    const unsigned from_last = all ? within / kHeadsTogether : shape.heads_left.quotient(within);
    head = first_head + within - from_last * (all ? kHeadsTogether : shape.heads_left.divisor());
    m_block = m_blocks - 1 - from_last;
  }
  const unsigned batch = shape.num_heads.quotient(head);
  return {static_cast<int>(m_block), static_cast<int>(head - batch * shape.num_heads.divisor()),
          static_cast<int>(batch)};
}

// The tiles of a block of a persistent kernel: one of each round of as many as there are blocks.
struct RoundRobin {
  const LaunchShape& shape;
  // Tiles of the whole problem; an index from there on is none. A reference to a kernel's
  // parameter: no register keeps it.
  const unsigned& count;

  // The block has the same number in all rounds, which under causality is every so many lengths
  // further; but where a window makes most tiles alike, and those of a head's first rows shorter,
  // another one each time, as else these would be the same blocks'.
  __device__ __forceinline__ unsigned index(unsigned round) const {
    const unsigned first = round * gridDim.x;
    if (shape.window.left == kUnlimited<int>) return first + blockIdx.x;
    return first + (blockIdx.x + round * (gridDim.x - (gridDim.x + 7) / 8)) % gridDim.x;
  }
  __device__ __forceinline__ WorkTile tile(unsigned index) const {
    return scheduled_tile(shape, index);
  }
};

// The same in equal shares: under causality, by which a head's later rows see more keys, tiles are
// taken by twos, the one with most keys that is left of a head and the one with fewest. With a
// block for each tile, blocks have them in the order of the hardware.
struct PairedTiles {
  const LaunchShape& shape;
  unsigned count;

  // next(before_first()) is the block's first tile.
  __device__ __forceinline__ unsigned before_first() const {
    return by_twos() ? 2 * blockIdx.x + 1 - 2 * gridDim.x : blockIdx.x - gridDim.x;
  }
  __device__ __forceinline__ unsigned next(unsigned index) const {
    if (!by_twos()) return index + gridDim.x;
    return index % 2 == 0 ? index + 1 : index + 2 * gridDim.x - 1;
  }
  __device__ __forceinline__ WorkTile tile(unsigned index) const {
    if (!by_twos()) return scheduled_tile(shape, index);
    const unsigned head = shape.num_m_blocks.quotient(index);
    const unsigned m_blocks = shape.num_m_blocks.divisor();
    const unsigned within = index - head * m_blocks;
    const unsigned batch = shape.num_heads.quotient(head);
    return {static_cast<int>(within % 2 == 0 ? m_blocks - 1 - within / 2 : within / 2),
            static_cast<int>(head - batch * shape.num_heads.divisor()), static_cast<int>(batch)};
  }

 private:
  __device__ __forceinline__ bool by_twos() const {
    return shape.longest_first && gridDim.x < count;
  }
};

}  // namespace dlattn::tile
