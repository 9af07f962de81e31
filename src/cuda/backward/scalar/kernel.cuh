#pragma once

// The backward pass on CUDA cores: the correct baseline, and what is left where no other family
// serves a problem. fp32 throughout; tensors of any dtype are converted as they are staged.
//
// Three kernels of 16 x 16 threads, each of which owns what it writes, so that bits never change:
//   keys     dk and dv of 64 keys of a KV head: loops over the query heads of the group and over
//            the queries that see the keys
//   queries  dq of 64 queries of a head, and their part of dalibi_slopes: loops over the keys seen
//   bias     64 x 64 numbers of dbias: loops over the dimensions that dbias has not
// All compute S = Q K^T and dP = dO V^T of a tile anew. Shared memory: staged rows, then P or dS,
// by which the next product's operand passes from thread to thread. Barriers: before and after rows
// are staged, and before P is overwritten by dS.

#include "cuda/backward/scalar/head.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::backward_scalar {

struct WorkTile {
  int tile, head, batch;
};
__device__ __forceinline__ WorkTile work_tile(const Grid& grid) {
  const auto tiles = static_cast<unsigned>(grid.tiles), heads = static_cast<unsigned>(grid.heads);
  const unsigned of_all = blockIdx.x / tiles, batch = of_all / heads;
  return {static_cast<int>(blockIdx.x - of_all * tiles), static_cast<int>(of_all - batch * heads),
          static_cast<int>(batch)};
}

// The sum over all threads of a block, in a fixed order; thread 0 has it.
__device__ __forceinline__ float sum_of_block(float x, float* warp_sums) {
  x = tile::reduce_sum<32>(x);
  __syncthreads();  // all have read what was there
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.0f;
  for (int warp = 0; warp < kNumThreads / 32; ++warp) x += warp_sums[warp];
  return x;
}

template <int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, kHeadDim == 64 ? 2 : 1)
    keys_kernel(const __grid_constant__ BackwardParams params,
                const __grid_constant__ Shape shape) {
  constexpr int kChunks = kHeadDim / kTile;
  ptx::wait_for_grids_ahead();
  if (blockIdx.x >= shape.grid.count()) return;  // a grid has a block even where there is no tile
  const AttentionParams& p = params.forward;
  auto* const staged = reinterpret_cast<float*>(ptx::dynamic_smem());
  float* const operand = staged + kStageSize;
  const WorkTile work = work_tile(shape.grid);
  const Sequence seq(p, work.batch);
  const int n0 = work.tile * kTile;
  if (n0 >= seq.seqlen_k) return;
  const int group = static_cast<int>(p.num_heads / p.num_heads_kv);
  float dk[kChunks][4][4] = {}, dv[kChunks][4][4] = {};
#pragma unroll 1
  for (int h = 0; h < group; ++h) {
    const Head head(params, shape, seq, work.batch, work.head * group + h);
    const tile::Range tiles = head.query_tiles(n0);
#pragma unroll 1
    for (int m = tiles.begin; m < tiles.end; ++m) {
      Gradients g;
      compute_gradients(g, head, m * kTile, n0, params.dk.data != nullptr, staged);
      if (params.dv.data) {
        write_operand<false>(operand, g.p);
        add_product(dv, operand, head.dout(), m * kTile, staged);
      }
      if (params.dk.data) {
        __syncthreads();  // all have read P
        write_operand<false>(operand, g.dx);
        add_product(dk, operand, head.q(), m * kTile, staged);
      }
    }
  }
  const auto store = [&](const MutableTensorView& x, const float (&acc)[kChunks][4][4],
                         std::int64_t columns, float factor) {
    if (!x.data) return;
    const std::int64_t first = seq.offset(x, seq.start_k, work.head) + n0 * x.row_stride;
    store_rows(acc, element_at(x.data, x.dtype, first), x.row_stride, x.dtype, seq.seqlen_k - n0,
               static_cast<int>(columns), factor);
  };
  store(params.dk, dk, p.head_dim, static_cast<float>(p.softmax_scale));
  store(params.dv, dv, p.head_dim_v, 1.0f);
}

// The sum of dS times distance over a thread's pairs: minus the gradient of the slope.
__device__ __forceinline__ float slope_sum(const Gradients& g, const Head& head, int m0, int n0) {
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int distance = head.mask.position(m0 + thread_row() + r) - (n0 + thread_column() + c);
      sum = fmaf(g.ds[r][c], magnitude(static_cast<float>(distance)), sum);
    }
  }
  return sum;
}

template <int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, kHeadDim == 256 ? 1 : 2)
    queries_kernel(const __grid_constant__ BackwardParams params,
                   const __grid_constant__ Shape shape) {
  constexpr int kChunks = kHeadDim / kTile;
  ptx::wait_for_grids_ahead();
  if (blockIdx.x >= shape.grid.count()) return;
  const AttentionParams& p = params.forward;
  auto* const staged = reinterpret_cast<float*>(ptx::dynamic_smem());
  float* const operand = staged + kStageSize;
  WorkTile work = work_tile(shape.grid);
  // Under causality the last queries see most keys.
  if (p.causal != Causal::kNone) work.tile = static_cast<int>(shape.grid.tiles) - 1 - work.tile;
  const Sequence seq(p, work.batch);
  const int m0 = work.tile * kTile;
  const Head head(params, shape, seq, work.batch, work.head);
  const tile::Range tiles = head.key_tiles(m0);
  float dq[kChunks][4][4] = {};
  float slope = 0.0f;
#pragma unroll 1
  for (int n = tiles.begin; n < tiles.end; ++n) {
    Gradients g;
    compute_gradients(g, head, m0, n * kTile, true, staged);
    if (params.dalibi_slopes.data) slope -= slope_sum(g, head, m0, n * kTile);
    if (params.dq.data) {
      __syncthreads();  // all have read their scores
      write_operand<true>(operand, g.dx);
      add_product(dq, operand, head.k(), n * kTile, staged);
    }
  }
  if (params.dalibi_slopes.data) {
    const float sum = sum_of_block(slope, staged);
    const std::int64_t first = backward_workspace(params, shape.parts_per_head).slope_parts;
    const std::int64_t of_head = work.batch * p.num_heads + work.head;
    if (threadIdx.x == 0)
      workspace_at<float>(params, first)[of_head * shape.parts_per_head + work.tile] = sum;
  }
  const MutableTensorView& x = params.dq;
  if (!x.data) return;
  const std::int64_t first = seq.offset(x, seq.start_q, work.head) + m0 * x.row_stride;
  store_rows(dq, element_at(x.data, x.dtype, first), x.row_stride, x.dtype, seq.seqlen_q - m0,
             static_cast<int>(p.head_dim), static_cast<float>(p.softmax_scale));
}

}  // namespace dlattn::backward_scalar
