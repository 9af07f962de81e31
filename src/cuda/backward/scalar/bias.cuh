#pragma once

// dbias: see kernel.cuh.

#include "cuda/backward/scalar/kernel.cuh"

namespace dlattn::backward_scalar {

// Stores the sums of a tile of dbias at `data`, of its first element: of each of its numbers, or
// added up over its queries, its keys or both.
__device__ __forceinline__ void store_bias(const float (&sum)[4][4], const BiasShape& bias,
                                           void* data, const MutableTensorView& x, int rows,
                                           int columns, float* numbers) {
  write_operand<false>(numbers, sum);  // where a thread's own scores were
  __syncthreads();
  const int num_rows = bias.per_query ? min(rows, kTile) : 1;
  const int num_columns = bias.per_key ? min(columns, kTile) : 1;
  with_element(x.dtype, [&](auto element) {
    using T = decltype(element);
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x); at < num_rows * num_columns; at += kNumThreads) {
      const int row = at / num_columns, column = at - row * num_columns;
      float total = 0.0f;
#pragma unroll 1
      for (int i = bias.per_query ? row : 0; i < (bias.per_query ? row + 1 : kTile); ++i) {
#pragma unroll 1
        for (int j = bias.per_key ? column : 0; j < (bias.per_key ? column + 1 : kTile); ++j)
          total += numbers[i * kLd + j];
      }
      static_cast<T*>(data)[row * x.row_stride + column * x.col_stride] =
          tile::from_float<T>(total);
    }
  });
}

// The indices of one dimension that a block loops over: its own, or all where dbias has one.
__device__ __forceinline__ tile::Range own_or_all(std::int64_t of_bias, std::int64_t all, int own) {
  if (of_bias == all) return {own, own + 1};
  return {0, static_cast<int>(all)};
}

template <int kThreads>  // a template, as headers may define it
__global__ void __launch_bounds__(kThreads, 2)
    bias_kernel(const __grid_constant__ BackwardParams params,
                const __grid_constant__ Shape shape) {
  ptx::wait_for_grids_ahead();
  if (blockIdx.x >= shape.grid.count()) return;
  const AttentionParams& p = params.forward;
  const BiasShape& bias = shape.bias;
  auto* const staged = reinterpret_cast<float*>(ptx::dynamic_smem());
  const WorkTile work = work_tile(shape.grid);
  const auto key_tiles = static_cast<int>(bias.key_tiles);
  const int m_tile = work.tile / key_tiles, n_tile = work.tile - m_tile * key_tiles;
  const tile::Range batches = own_or_all(bias.batches, p.batch_size, work.batch);
  const tile::Range heads = own_or_all(bias.heads, p.num_heads, work.head);
  float sum[4][4] = {};
#pragma unroll 1
  for (int batch = batches.begin; batch < batches.end; ++batch) {
    const Sequence seq(p, batch);
#pragma unroll 1
    for (int h = heads.begin; h < heads.end; ++h) {
      const Head head(params, shape, seq, batch, h);
      const int m_end = bias.per_query ? m_tile + 1 : (seq.seqlen_q + kTile - 1) / kTile;
#pragma unroll 1
      for (int m = bias.per_query ? m_tile : 0; m < m_end; ++m) {
        tile::Range tiles = head.key_tiles(m * kTile);
        if (bias.per_key) tiles = {max(tiles.begin, n_tile), min(tiles.end, n_tile + 1)};
#pragma unroll 1
        for (int n = tiles.begin; n < tiles.end; ++n) {
          Gradients g;
          compute_gradients(g, head, m * kTile, n * kTile, true, staged);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i][j] += g.ds[i][j];
          }
        }
      }
    }
  }
  const MutableTensorView& x = params.dbias;
  const int m0 = m_tile * kTile, n0 = n_tile * kTile;
  const std::int64_t first = work.batch * x.batch_stride + work.head * x.head_stride +
                             m0 * x.row_stride + n0 * x.col_stride;
  store_bias(sum, bias, element_at(x.data, x.dtype, first), x, static_cast<int>(p.seqlen_q) - m0,
             static_cast<int>(p.seqlen_k) - n0, staged + kStageSize);
}

}  // namespace dlattn::backward_scalar
