#pragma once

#include "cuda/tile/launch_shape.h"

namespace dlattn::tile {

// What one thread block computes: rows m_block * kBlockM and on, of one head of one batch entry.
struct Work {
  int m_block;
  int head;
  int batch;
};

// Heads that are walked together, longest first.
constexpr unsigned kHeadsTogether = 8;

// The grid is one-dimensional, which no problem outgrows: row blocks vary fastest, so that blocks
// running side by side read the same keys, then heads, then batch entries. Longest first, a few
// heads are walked together, all their last row blocks before the ones before those: then the grid
// ends with the short blocks of all of them. `block`: blockIdx.x.
__device__ __forceinline__ Work scheduled_work(const AttentionParams& params,
                                               const LaunchShape& shape, unsigned block) {
  unsigned head_of_batch = shape.num_m_blocks.quotient(block);
  unsigned m_block = block - head_of_batch * shape.num_m_blocks.divisor();
  if (shape.longest_first) {
    const unsigned m_blocks = shape.num_m_blocks.divisor();
    const unsigned heads = shape.num_heads.divisor() * static_cast<unsigned>(params.batch_size);
    const unsigned first_head = head_of_batch / kHeadsTogether * kHeadsTogether;
    const unsigned block_of_group = block - first_head * m_blocks;
    unsigned from_last = block_of_group / kHeadsTogether;
    unsigned head_of_group = block_of_group % kHeadsTogether;
    if (heads - first_head < kHeadsTogether) {
      from_last = block_of_group / (heads - first_head);
      head_of_group = block_of_group % (heads - first_head);
    }
    m_block = m_blocks - 1 - from_last;
    head_of_batch = first_head + head_of_group;
  }
  const unsigned batch = shape.num_heads.quotient(head_of_batch);
  return {static_cast<int>(m_block),
          static_cast<int>(head_of_batch - batch * shape.num_heads.divisor()),
          static_cast<int>(batch)};
}
__device__ __forceinline__ Work scheduled_work(const AttentionParams& params,
                                               const LaunchShape& shape) {
  return scheduled_work(params, shape, blockIdx.x);
}

}  // namespace dlattn::tile
