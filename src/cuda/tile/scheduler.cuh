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
// running side by side read the same keys, then heads, then batch entries.
__device__ __forceinline__ Work scheduled_work(const AttentionParams& params,
                                               const LaunchShape& shape) {
  const unsigned block = blockIdx.x;
  const unsigned m_blocks = static_cast<unsigned>(shape.num_m_blocks);
  const unsigned heads = static_cast<unsigned>(params.num_heads);
  const int m_block = static_cast<int>(block % m_blocks);
  const unsigned head_of_batch = block / m_blocks;
  return {shape.longest_first ? shape.num_m_blocks - 1 - m_block : m_block,
          static_cast<int>(head_of_batch % heads), static_cast<int>(head_of_batch / heads)};
}

}  // namespace dlattn::tile
