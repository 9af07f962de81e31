#pragma once

// Adds up the partial sums that the launches of a backward pass have left in the workspace:
// dalibi_slopes, then dsinks. A thread block has one number of the result, and adds its parts up in
// a fixed order: sequence by sequence, head by head, the parts of a head spread over the threads.
// What a result has no stride for is summed over.

#include <cstdint>

#include "cuda/plan/backward_workspace.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/reduce/partial_sums/traits.h"
#include "cuda/tile/warp.cuh"

namespace dlattn::reduce::partial_sums {

// The sum of the parts of heads of sequences by all threads; thread 0 has it.
template <typename T>
__device__ __forceinline__ float sum_parts(const T* parts, const AttentionParams& p,
                                           std::int64_t per_head, const Extent& batch,
                                           const Extent& head, float* warp_sums) {
  float sum = 0.0f;
  for (std::int64_t b = batch.begin; b < batch.end; ++b) {
    for (std::int64_t h = head.begin; h < head.end; ++h) {
      const T* const own = parts + (b * p.num_heads + h) * per_head;
      for (std::int64_t i = threadIdx.x; i < per_head; i += kNumThreads) sum += own[i];
    }
  }
  sum = tile::reduce_sum<32>(sum);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int warp = 0; warp < kNumThreads / 32; ++warp) sum += warp_sums[warp];
  return sum;
}

template <typename T>  // of partial sums and results: float
__global__ void __launch_bounds__(kNumThreads)
    reduce_kernel(const __grid_constant__ BackwardParams params,
                  const __grid_constant__ Shape shape) {
  auto* const warp_sums = reinterpret_cast<float*>(ptx::dynamic_smem());
  ptx::wait_for_grids_ahead();
  const AttentionParams& p = params.forward;
  const BackwardWorkspace map = backward_workspace(params, shape.parts_per_head);
  const bool is_slope = blockIdx.x < shape.slopes.count();
  const std::int64_t index = is_slope ? blockIdx.x : blockIdx.x - shape.slopes.count();
  const Numbers& numbers = is_slope ? shape.slopes : shape.sinks;
  const std::int64_t b = index / numbers.heads, h = index - b * numbers.heads;
  const std::int64_t offset = is_slope ? map.slope_parts : map.sink_parts;
  const float sum = sum_parts(
      workspace_at<const T>(params, offset), p, is_slope ? shape.parts_per_head : delta_blocks(p),
      extent(b, numbers.batches, p.batch_size), extent(h, numbers.heads, p.num_heads), warp_sums);
  if (threadIdx.x != 0) return;
  if (is_slope) {
    const auto& to = params.dalibi_slopes;
    static_cast<float*>(to.data)[b * to.batch_stride + h * to.head_stride] = sum;
  } else {
    const auto& to = params.dsinks;
    static_cast<float*>(to.data)[h * to.head_stride] = sum;
  }
}

}  // namespace dlattn::reduce::partial_sums
