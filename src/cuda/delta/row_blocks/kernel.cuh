#pragma once

// Prepares a backward pass: lse, most often times log2(e), and delta = rowsum(dout * out) - dlse of
// every row of q (cuda/plan/backward_workspace.h), partial sums of dsinks, and zeros.
//
// A thread block has kDeltaRows rows of one head of one sequence, 8 lanes a row. What it reads of
// them is on its way together, as a small grid has nothing else to do meanwhile. All blocks
// together set to zero what nobody else writes: rows of dq, dk and dv that belong to no sequence,
// and memory of the workspace that kernels add to. Shared memory: a number a warp. Barriers: one,
// where warps' sums are added up.

#include "cuda/delta/row_blocks/traits.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/tile/delta_rows.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::delta::row_blocks {

static_assert(kNumThreads == tile::kDeltaThreads && kLanes == tile::delta_rows::kLanes, "");

// The last sequence that begins at or before a row, or the first.
__device__ __forceinline__ int sequence_of_row(const std::int32_t* cu_seqlens, int batch_size,
                                               int row, std::int64_t total) {
  int first = 0, end = batch_size;
  while (end - first > 1) {
    const int middle = first + (end - first) / 2;
    (tile::sequence_start(cu_seqlens, middle, total) <= row ? first : end) = middle;
  }
  return first;
}

template <typename T, typename View>
__device__ __forceinline__ void clear_row(const View& x, int row, std::int64_t heads,
                                          std::int64_t columns) {
  if (!x.data) return;
  for (std::int64_t head = 0; head < heads; ++head) {
    T* const to = static_cast<T*>(x.data) + row * x.row_stride + head * x.head_stride;
    for (std::int64_t column = threadIdx.x % 32; column < columns; column += 32)
      to[column] = tile::from_float<T>(0.0f);
  }
}

// Rows of dq, dk and dv that no sequence has, a warp each.
template <typename T>
__device__ __forceinline__ void clear_rows_between(const BackwardParams& b) {
  const AttentionParams& p = b.forward;
  const auto batch_size = static_cast<int>(p.batch_size);
  const std::int64_t step = std::int64_t{gridDim.x} * (kNumThreads / 32);
  const std::int64_t all = p.total_q + p.total_k;
  for (std::int64_t i = std::int64_t{blockIdx.x} * (kNumThreads / 32) + threadIdx.x / 32; i < all;
       i += step) {
    const bool is_query = i < p.total_q;
    const int row = static_cast<int>(is_query ? i : i - p.total_q);
    bool exists = false;
    if (batch_size > 0) {
      const int sequence = is_query ? sequence_of_row(p.cu_seqlens_q, batch_size, row, p.total_q)
                                    : sequence_of_row(p.cu_seqlens_k, batch_size, row, p.total_k);
      const tile::SequenceRows rows =
          is_query ? tile::query_rows(p, sequence) : tile::key_rows(p, sequence);
      exists = row >= rows.start && row < rows.start + rows.count;
    }
    if (exists) continue;
    if (is_query) {
      clear_row<T>(b.dq, row, p.num_heads, p.head_dim);
    } else {
      clear_row<T>(b.dk, row, p.num_heads_kv, p.head_dim);
      clear_row<T>(b.dv, row, p.num_heads_kv, p.head_dim_v);
    }
  }
}

__device__ __forceinline__ void clear_workspace(const BackwardParams& b, const Shape& shape) {
  constexpr int kBytes = 16;
  const std::int64_t step = std::int64_t{gridDim.x} * kNumThreads * kBytes;
  const std::int64_t own = (std::int64_t{blockIdx.x} * kNumThreads + threadIdx.x) * kBytes;
  const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (std::int64_t at = shape.clear_begin + own; at < shape.clear_end; at += step)
    tile::store(workspace_at<float>(b, at), zeros);
}

template <typename T>
__global__ void __launch_bounds__(kNumThreads, 2)
    delta_kernel(const __grid_constant__ BackwardParams params,
                 const __grid_constant__ Shape shape) {
  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  clear_workspace(params, shape);
  if (params.forward.cu_seqlens_q) clear_rows_between<T>(params);
  if (blockIdx.x >= shape.num_tiles) return;
  const AttentionParams& p = params.forward;
  const unsigned of_all = blockIdx.x / shape.num_row_blocks;  // heads
  const auto row_block = static_cast<int>(blockIdx.x - of_all * shape.num_row_blocks);
  const auto num_heads = static_cast<unsigned>(p.num_heads);
  const unsigned batch = of_all / num_heads;
  const float sum = tile::compute_delta_rows<T>(params, shape.wide, row_block,
                                                static_cast<int>(of_all - batch * num_heads),
                                                static_cast<int>(batch));
  if (!params.dsinks.data) return;
  auto* const warp_sums = reinterpret_cast<float*>(ptx::dynamic_smem());
  const float warp_sum = tile::reduce_sum<32>(sum);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = warp_sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0.0f;
  for (int warp = 0; warp < kNumThreads / 32; ++warp) total += warp_sums[warp];
  workspace_at<float>(params, backward_workspace(params, 0).sink_parts)[blockIdx.x] = total;
}

}  // namespace dlattn::delta::row_blocks
