#pragma once

#include <cstdint>

#include "dlattn/merge.h"

// The numbers that plan and kernel share.
namespace dlattn::merge::row_per_warp {

constexpr int kNumWarps = 4;  // per thread block, a row of out each at a time
constexpr int kNumThreads = kNumWarps * 32;
constexpr int kVector = 4;  // columns that a lane takes at once, where rows are aligned for it

// Whether all rows of all tensors begin at multiples of kVector elements of this size, and end so.
inline bool rows_are_aligned(const MergeParams& p, int element_size) {
  const auto aligned = [&](const auto& x) {
    return reinterpret_cast<std::uintptr_t>(x.data) % (kVector * element_size) == 0 &&
           x.batch_stride % kVector == 0 && x.row_stride % kVector == 0 &&
           x.head_stride % kVector == 0;
  };
  bool all = p.head_dim_v % kVector == 0 && aligned(p.out);
  for (int n = 0; n < p.num_states; ++n) all = all && aligned(p.outs[n]);
  return all;
}

}  // namespace dlattn::merge::row_per_warp
