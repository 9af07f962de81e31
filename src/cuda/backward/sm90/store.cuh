#pragma once

#include "cuda/backward/sm90/setup.cuh"
#include "cuda/tile/quad_rows.cuh"

namespace dlattn::backward_sm90 {

// Stores a warpgroup's 64 rows of a gradient from accumulators, 16 bytes a lane. `rows`: those of
// the sequence; `first`: of the accumulators' first one in it. Nothing if the gradient is not
// wanted.
template <typename T, int kColumns>
__device__ __forceinline__ void store_rows(const MutableTensorView& to, int batch, int head,
                                           const tile::SequenceRows& rows, int first, int columns,
                                           float scale, const float (&acc)[kColumns / 2]) {
  if (!to.data) return;
  const ThreadIndex thread;
  const int lane_column = thread.lane % 4 * 8;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first + thread.warp * 16 + 8 * h + thread.lane / 4;
    T* const out = static_cast<T*>(to.data) + batch * to.batch_stride + head * to.head_stride +
                   (rows.start + static_cast<std::int64_t>(row)) * to.row_stride + lane_column;
    const int left = row < rows.count ? columns - lane_column : 0;
    tile::store_quad_row<T, kColumns>(out, left, scale, thread.lane,
                                      [&](int j) { return acc + 4 * j + 2 * h; });
  }
}

}  // namespace dlattn::backward_sm90
