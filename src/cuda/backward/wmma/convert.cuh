#pragma once

// dQ from its sum in fp32 (traits.h): a warp takes 16 queries of one head, part after part of their
// columns, which it has as in accumulators.

#include "cuda/backward/wmma/dq_sum.cuh"
#include "cuda/backward/wmma/sequence.cuh"
#include "cuda/backward/wmma/store.cuh"
#include "cuda/backward/wmma/traits.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/tile/scheduler.cuh"

namespace dlattn::backward_wmma {

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads)
    convert_kernel(const __grid_constant__ BackwardParams params,
                   const __grid_constant__ Shape shape) {
  const tile::WorkTile work = tile::scheduled_tile(shape, blockIdx.x);
  ptx::wait_for_grids_ahead();
  if (blockIdx.x >= shape.num_blocks) return;
  const SequenceOf seq(params.forward, work.batch);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int part = work.m_block * kNumWarps + static_cast<int>(threadIdx.x) / 32;
  if (part * kPartRows >= seq.seqlen_q) return;

  constexpr int kColumnParts = kHeadDim / kPartColumns;
  const float* sum = dq_part(params, shape, seq, work.batch, work.head, part, kColumnParts);
  const MutableTensorView& view = params.dq;
  T* rows = seq.rows<T>(view, seq.start_q, work.head);
  const int columns = static_cast<int>(params.forward.head_dim);
#pragma unroll 1
  for (int c = 0; c < kColumnParts; ++c, sum += kPartSize) {
    float dq[kPartSize / 32];
    load_sum(sum, lane, dq);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = part * kPartRows + lane / 4 + 8 * h;
      const bool exists = row < seq.seqlen_q;
      store_row<T, kPartColumns>(rows + (exists ? row : 0) * view.row_stride + c * kPartColumns,
                                 exists, columns - c * kPartColumns, shape.store_bytes,
                                 shape.softmax_scale, lane,
                                 [&](int j) { return dq + 4 * j + 2 * h; });
    }
  }
}

}  // namespace dlattn::backward_wmma
