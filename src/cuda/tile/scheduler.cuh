#pragma once

#include "cuda/tile/launch_shape.h"

namespace dlattn::tile {

// What one thread block computes: rows m_block * kBlockM and on, of one head of one batch entry.
struct Work {
  int m_block;
  int head;
  int batch;
};

// The grid is one-dimensional, which no problem outgrows: row blocks vary fastest, so that blocks
// running side by side read the same keys, then heads, then batch entries. Longest first, a few
// heads are walked together, all their last row blocks before the ones before those: then the grid
// ends with the short blocks of all of them. `block`: blockIdx.x.
__device__ __forceinline__ Work scheduled_work(const AttentionParams& params,
                                               const LaunchShape& shape, unsigned block) {
  constexpr unsigned kHeadsTogether = 8;
  const unsigned m_blocks = static_cast<unsigned>(shape.num_m_blocks);
  const unsigned heads = static_cast<unsigned>(params.num_heads);
  unsigned m_block = block % m_blocks;
  unsigned head_of_batch = block / m_blocks;
  if (shape.longest_first) {
    const unsigned first_head = head_of_batch / kHeadsTogether * kHeadsTogether;
    const unsigned together =
        min(kHeadsTogether, heads * static_cast<unsigned>(params.batch_size) - first_head);
    const unsigned block_of_group = block - first_head * m_blocks;
    m_block = m_blocks - 1 - block_of_group / together;
    head_of_batch = first_head + block_of_group % together;
  }
  return {static_cast<int>(m_block), static_cast<int>(head_of_batch % heads),
          static_cast<int>(head_of_batch / heads)};
}
__device__ __forceinline__ Work scheduled_work(const AttentionParams& params,
                                               const LaunchShape& shape) {
  return scheduled_work(params, shape, blockIdx.x);
}

}  // namespace dlattn::tile
