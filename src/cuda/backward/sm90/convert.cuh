#pragma once

#include "cuda/backward/sm90/setup.cuh"
#include "cuda/backward/sm90/store.cuh"
#include "cuda/ptx/grid_dependency.cuh"

namespace dlattn::backward_sm90 {

// A consumer's part of a tile of queries, from the sum of dQ, as a consumer of the backward kernel
// had it, to dq. `sum`: of the head's first row.
template <typename T, int kHeadDim>
__device__ __forceinline__ void convert_part(const Problem& p, const float* sum, int entry,
                                             int head, const tile::SequenceRows& rows, int m,
                                             int part) {
  constexpr int kBlockM = block_m(kHeadDim, false), kColumns = part_columns(kHeadDim, false);
  constexpr int kRowParts = dq_parts(kHeadDim, false).rows;
  const int row_part = part % kRowParts, column = part / kRowParts * kColumns;
  const float* const from = sum + static_cast<std::int64_t>(m) * kBlockM * kHeadDim +
                            part * kWarpgroupRows * kColumns + ThreadIndex().index * 4;
  float acc[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 4) {
    float numbers[4];
    tile::load(numbers, from + i * kWarpgroupThreads);
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[i + e] = numbers[e];
  }
  MutableTensorView columns = p.dq;
  columns.data = static_cast<T*>(p.dq.data) + column;
  store_rows<T, kColumns>(columns, entry, head, rows, m * kBlockM + row_part * kWarpgroupRows,
                          p.head_dim - column, p.softmax_scale, acc);
}

// The sum of dQ to dq. A thread block has a tile of block_m queries of a head, each of its
// warpgroups one part of it.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumConsumers* kWarpgroupThreads)
    convert_kernel(const __grid_constant__ Problem p) {
  // A block works out its place before the wait where no memory is read: for the grid ahead to
  // hide.
  if (p.cu_seqlens_q) ptx::wait_for_grids_ahead();
  const tile::WorkTile work = work_place(p, blockIdx.x);
  tile::SequenceRows rows = {0, static_cast<int>(p.seqlen_q)};
  int entry = work.batch;
  if (p.cu_seqlens_q && blockIdx.x < p.num_blocks) {
    rows = tile::query_rows(p, work.batch);
    entry = 0;
  }
  const std::int64_t first =
      first_row(p, static_cast<int>(p.num_heads.divisor()), work.batch, work.head, rows.start);
  if (!p.cu_seqlens_q) ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  if (blockIdx.x >= p.num_blocks || work.m_block * block_m(kHeadDim, false) >= rows.count) return;
  convert_part<T, kHeadDim>(p, p.dq_sum + first * kHeadDim, entry, work.head, rows, work.m_block,
                            static_cast<int>(threadIdx.x) / kWarpgroupThreads);
}

}  // namespace dlattn::backward_sm90
