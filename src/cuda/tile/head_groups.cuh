#pragma once

#include "cuda/plan/head_groups.h"
#include "cuda/tile/scheduler.cuh"

namespace dlattn::tile {

// Work tile `index` of a grid as scheduled_tile() counts them, but for how many heads are walked
// together longest first: those of `groups`.
__device__ __forceinline__ WorkTile scheduled_tile(const LaunchShape& shape,
                                                   const HeadGroups& groups, unsigned index) {
  const unsigned m_blocks = shape.num_m_blocks.divisor();
  unsigned head = shape.num_m_blocks.quotient(index);  // of all batch entries
  unsigned m_block = index - head * m_blocks;
  if (shape.longest_first) {
    const unsigned first_head = groups.together.quotient(head) * groups.together.divisor();
    // seed: heads-of-group
    const Divider& heads = first_head < groups.in_groups ? groups.together : groups.left;
    const unsigned within = index - first_head * m_blocks;
    const unsigned from_last = heads.quotient(within);
    head = first_head + within - from_last * heads.divisor();
    m_block = m_blocks - 1 - from_last;
  }
  const unsigned batch = shape.num_heads.quotient(head);
  return {static_cast<int>(m_block), static_cast<int>(head - batch * shape.num_heads.divisor()),
          static_cast<int>(batch)};
}

}  // namespace dlattn::tile
