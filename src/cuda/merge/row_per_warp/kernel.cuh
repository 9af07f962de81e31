#pragma once

// Merge of partial attention results: lse = log sum_n exp(lse_n), out = sum_n exp(lse_n - lse)
// out_n.
//
// A warp per row of out (one query of one head). Lane n holds part n's lse, hence at most 32 parts;
// weights are broadcast by shuffles while the lanes walk along the row. No shared memory, no
// barriers.

#include <cstdint>

#include "cuda/merge/row_per_warp/traits.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"
#include "dlattn/merge.h"

namespace dlattn::merge::row_per_warp {

static_assert(kMaxMergeStates <= 32, "a lane per part");

struct Row {
  std::int64_t batch;
  std::int64_t query;
  std::int64_t head;
};

// Rows in the order of a contiguous out, [batch_size, seqlen_q, num_heads].
__device__ __forceinline__ Row row_at(const MergeParams& p, std::int64_t index) {
  const std::int64_t position = index / p.num_heads;
  return {position / p.seqlen_q, position % p.seqlen_q, index % p.num_heads};
}

template <typename T>
__device__ __forceinline__ void merge_row(const MergeParams& p, const Row& row, int lane_idx) {
  float lse = -INFINITY;
  if (lane_idx < p.num_states) {
    lse = p.lses[lane_idx].data[row.batch * p.lses[lane_idx].batch_stride +
                                row.head * p.lses[lane_idx].head_stride +
                                row.query * p.lses[lane_idx].row_stride];
    if (lse == INFINITY) lse = -INFINITY;  // a part without keys, either way
  }
  const float max = tile::reduce_max<32>(lse);
  const float finite_max = max == -INFINITY ? 0.0f : max;
  const float weight = ptx::exp2((lse - finite_max) * tile::kLog2e);
  const float sum = tile::reduce_sum<32>(weight);
  const float scale = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);

  T* out = static_cast<T*>(p.out.data) + row.batch * p.out.batch_stride +
           row.query * p.out.row_stride + row.head * p.out.head_stride;
  // All lanes take part in every shuffle, so they walk in step.
  for (std::int64_t first = 0; first < p.head_dim_v; first += 32) {
    const std::int64_t column = first + lane_idx;
    float acc = 0.0f;
    for (int n = 0; n < p.num_states; ++n) {
      const float part_weight = __shfl_sync(tile::kFullMask, weight, n);
      if (part_weight == 0.0f || column >= p.head_dim_v)
        continue;  // an empty part may hold anything
      const T* part = static_cast<const T*>(p.outs[n].data) + row.batch * p.outs[n].batch_stride +
                      row.query * p.outs[n].row_stride + row.head * p.outs[n].head_stride;
      acc += part_weight * tile::to_float(part[column]);
    }
    if (column < p.head_dim_v) out[column] = tile::from_float<T>(acc * scale);
  }
  if (lane_idx == 0) {
    p.lse.data[row.batch * p.lse.batch_stride + row.head * p.lse.head_stride + row.query] =
        finite_max + logf(sum);
  }
}

template <typename T>
__global__ void __launch_bounds__(kNumThreads) kernel(const __grid_constant__ MergeParams params) {
  const std::int64_t num_rows = params.batch_size * params.seqlen_q * params.num_heads;
  ptx::wait_for_grids_ahead();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kNumWarps;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kNumWarps + threadIdx.x / 32;
       i < num_rows; i += step) {
    merge_row<T>(params, row_at(params, i), threadIdx.x % 32);
  }
}

}  // namespace dlattn::merge::row_per_warp
