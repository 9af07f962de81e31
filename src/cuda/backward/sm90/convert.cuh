#pragma once

#include "cuda/backward/sm90/setup.cuh"
#include "cuda/backward/sm90/store.cuh"
#include "cuda/ptx/grid_dependency.cuh"

namespace dlattn::backward_sm90 {

// The sum of dQ to dq, or zeros where no block of keys has added to it. A thread block has a tile
// of block_m queries of a head, each of its warpgroups one part of it, which it reads as a consumer
// of the backward kernel had it.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumConsumers* kWarpgroupThreads)
    convert_kernel(const __grid_constant__ Problem p) {
  constexpr int kBlockM = block_m(kHeadDim, false), kColumns = part_columns(kHeadDim, false);
  constexpr int kRowParts = dq_parts(kHeadDim, false).rows;
  // Places are worked out before the wait where no memory is read: for the grid ahead to hide.
  if (p.cu_seqlens_q) ptx::wait_for_grids_ahead();
  const tile::WorkTile work = work_place(p, blockIdx.x);
  tile::SequenceRows rows = {0, static_cast<int>(p.seqlen_q)};
  int entry = work.batch;
  if (p.cu_seqlens_q && blockIdx.x < p.num_blocks) {
    rows = tile::query_rows(p, work.batch);
    entry = 0;
  }
  const int part = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
  const int row_part = part % kRowParts, column = part / kRowParts * kColumns;
  const ThreadIndex thread;
  const std::int64_t first =
      first_row(p, static_cast<int>(p.num_heads.divisor()), work.batch, work.head, rows.start);
  const std::int64_t tile_row = first + work.m_block * kBlockM;
  const float* const from =
      p.dq_sum + tile_row * kHeadDim + part * kWarpgroupRows * kColumns + thread.index * 4;
  const unsigned* counter = p.dq_counters;
  if (counter) counter += (tile_row + row_part * kWarpgroupRows) >> p.dq_counter_shift;
  if (!p.cu_seqlens_q) ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  if (blockIdx.x >= p.num_blocks || work.m_block * kBlockM >= rows.count) return;
  float acc[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 4) {
    float numbers[4];
    tile::load(numbers, from + i * kWarpgroupThreads);
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[i + e] = numbers[e];
  }
  // The sum of a tile that sees no keys has not been written. Asked for behind the numbers, so that
  // these are not waited for one round trip later.
  if (counter && *counter == 0) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[i] = 0.0f;
  }
  MutableTensorView columns = p.dq;
  columns.data = static_cast<T*>(p.dq.data) + column;
  store_rows<T, kColumns>(columns, entry, work.head, rows,
                          work.m_block * kBlockM + row_part * kWarpgroupRows, p.head_dim - column,
                          p.softmax_scale, acc);
}

}  // namespace dlattn::backward_sm90
