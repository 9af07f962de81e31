#pragma once

// What k is stored without: the mean of the sampled keys of each head of each sequence, to k_shift.
//
// A thread block for each head of each sequence. A thread has 8 columns of every 16th sampled key,
// whose loads are all on their way together, and adds them up in order; then the first threads add
// up the 16 partial sums of a column each. So sums have the order of core/quantized.h.
// Shared memory: float [kPartialSums][kColumns], the partial sums.
// Barriers: one __syncthreads between the two.

#include "core/rounding.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/quantize/key_blocks/rows.cuh"

namespace dlattn::quantize::key_blocks {

// The sum of 8 columns of the sampled keys `part`, part + kPartialSums, ...
template <bool kWhole, typename T>
__device__ __forceinline__ void add_sampled(const tile::RowSource<T>& k, int count, int part,
                                            int first_column, int head_dim, float (&sums)[kChunk]) {
  constexpr int kKeys = kSampledKeys / kPartialSums;
  const int sampled = min(count, kSampledKeys);
  tile::Vec<T, kChunk> chunks[kKeys];
#pragma unroll
  for (int n = 0; n < kKeys; ++n) {
    const int i = part + n * kPartialSums;
    // Where there are fewer, these are all keys: no division but by a power of two.
    const std::int64_t key =
        sampled == kSampledKeys ? sampled_key(i, kSampledKeys, count) : std::int64_t{i};
    chunks[n] = load_chunk<kWhole>(k.row(key), first_column, i < sampled ? head_dim : 0);
  }
#pragma unroll
  for (int n = 0; n < kKeys; ++n) {
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      const float x = tile::to_float(chunks[n].x[j]);
      const float counted = magnitude_bits(x) < kInfinityBits ? x : 0.0f;
      // Not fused, for the bits of it: the product may be subnormal.
      sums[j] = __fadd_rn(sums[j], __fmul_rn(counted, 1.0f / kSampledKeys));
    }
  }
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(num_shift_threads(kColumns), 1)
    shift_kernel(const __grid_constant__ QuantizeParams params,
                 const __grid_constant__ Shape shape) {
  constexpr int kChunks = kColumns / kChunk;
  auto* const sSums = reinterpret_cast<float*>(ptx::dynamic_smem());
  const int thread = static_cast<int>(threadIdx.x);
  const int sequence = static_cast<int>(shape.heads.quotient(blockIdx.x));
  const int num_heads = static_cast<int>(shape.heads.divisor());

  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  const Head head(params, sequence, static_cast<int>(blockIdx.x) - sequence * num_heads);
  const tile::RowSource<T> k = head.rows<T>(params.k);
  const int part = thread / kChunks, first_column = thread % kChunks * kChunk;
  const int head_dim = static_cast<int>(params.head_dim);
  float sums[kChunk] = {};
  if (shape.whole_k) {
    add_sampled<true>(k, head.count, part, first_column, head_dim, sums);
  } else {
    add_sampled<false>(k, head.count, part, first_column, head_dim, sums);
  }
#pragma unroll
  for (int j = 0; j < kChunk; ++j) sSums[part * kColumns + first_column + j] = sums[j];
  __syncthreads();

  if (thread >= kColumns) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPartialSums; ++i) sum += sSums[i * kColumns + thread];
  const int sampled = min(head.count, kSampledKeys);
  const float mean =
      sampled ? sum * (static_cast<float>(kSampledKeys) / static_cast<float>(sampled)) : 0.0f;
  const_cast<float*>(shape.to.k_shift)[head.sequence * shape.to.shift_batch_stride +
                                       head.head * shape.to.shift_head_stride + thread] = mean;
}

}  // namespace dlattn::quantize::key_blocks
