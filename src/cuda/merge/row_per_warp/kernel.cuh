#pragma once

// Merge of partial attention results: lse = log sum_n exp(lse_n), out = sum_n exp(lse_n - lse)
// out_n.
//
// A warp per row of out (one query of one head). Lane n holds part n's lse, hence at most 32 parts;
// weights are broadcast by shuffles while the lanes walk along the row, kCount columns each. No
// shared memory, no barriers.

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
  if (static_cast<std::uint64_t>(index) >> 32 == 0) {  // quicker
    const auto i = static_cast<std::uint32_t>(index);
    const auto num_heads = static_cast<std::uint32_t>(p.num_heads);
    const std::uint32_t position = i / num_heads;
    const auto seqlen_q = static_cast<std::uint32_t>(p.seqlen_q);
    return {position / seqlen_q, position % seqlen_q, i % num_heads};
  }
  const std::int64_t position = index / p.num_heads;
  return {position / p.seqlen_q, position % p.seqlen_q, index % p.num_heads};
}

// Elements of a row of part n.
template <typename T>
__device__ __forceinline__ const T* part_of(const MergeParams& p, const Row& row, int n) {
  return static_cast<const T*>(p.outs[n].data) + row.batch * p.outs[n].batch_stride +
         row.query * p.outs[n].row_stride + row.head * p.outs[n].head_stride;
}

// kCount neighbouring columns of a row, from all parts. Several parts are asked for before the
// first one is added: what the kernel takes is the time of loads, one after the other.
template <int kCount, typename T>
__device__ __forceinline__ void merge_columns(const MergeParams& p, const Row& row, float weight,
                                              std::int64_t column, float (&acc)[kCount]) {
  constexpr int kTogether = 4;
  static_assert(32 % kTogether == 0, "a lane has every part's weight");
  using Columns = tile::Vec<T, kCount>;
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = 0.0f;
  for (int first = 0; first < p.num_states; first += kTogether) {
    Columns columns[kTogether];
    float weights[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      // All lanes take part in every shuffle. An empty part may hold anything, and weighs 0, as a
      // part does that there is not.
      weights[j] = __shfl_sync(tile::kFullMask, weight, first + j);
      if (column >= p.head_dim_v) weights[j] = 0.0f;
      if (weights[j] == 0.0f) continue;
      columns[j] = *reinterpret_cast<const Columns*>(part_of<T>(p, row, first + j) + column);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (weights[j] == 0.0f) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) acc[i] += weights[j] * tile::to_float(columns[j].x[i]);
    }
  }
}

template <typename T, int kCount>
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
  for (std::int64_t first = 0; first < p.head_dim_v; first += 32 * kCount) {
    const std::int64_t column = first + lane_idx * kCount;
    float acc[kCount];
    merge_columns<kCount, T>(p, row, weight, column, acc);
    if (column >= p.head_dim_v) continue;
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc[i] *= scale;
    tile::store(out + column, acc);
  }
  if (lane_idx == 0) {
    p.lse.data[row.batch * p.lse.batch_stride + row.head * p.lse.head_stride + row.query] =
        finite_max + logf(sum);
  }
}

// `aligned`: rows_are_aligned().
template <typename T>
__global__ void __launch_bounds__(kNumThreads)
    kernel(const __grid_constant__ MergeParams params, const __grid_constant__ bool aligned) {
  const std::int64_t num_rows = params.batch_size * params.seqlen_q * params.num_heads;
  ptx::wait_for_grids_ahead();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kNumWarps;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kNumWarps + threadIdx.x / 32;
       i < num_rows; i += step) {
    const Row row = row_at(params, i);
    if (aligned) {
      merge_row<T, kVector>(params, row, threadIdx.x % 32);
    } else {
      merge_row<T, 1>(params, row, threadIdx.x % 32);
    }
  }
}

}  // namespace dlattn::merge::row_per_warp
