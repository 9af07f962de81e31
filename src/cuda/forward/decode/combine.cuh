#pragma once

// Adds up the parts of rows of out that several thread blocks have left in the workspace.
//
// A thread block per row of out. Its threads form groups, each of which has all columns, four a
// thread, of every so many-th part; at the end the groups' sums are added up in shared memory. Rows
// that one thread block had all keys of are done already, and rows that see no key get their result
// here.

#include "cuda/forward/decode/parts.cuh"
#include "cuda/forward/decode/units.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/smem.cuh"

namespace dlattn::decode {

// Parts of a row, as they are added up one by one.
struct RunningSum {
  tile::OnlineSoftmax row;
  float acc[4] = {};

  __device__ __forceinline__ void add(const PartStats& stats, const float (&x)[4]) {
    const float factor = row.raise_max(stats.row_max, 1.0f);
    const float weight = row.probability(stats.row_max, 1.0f);
    row.row_sum = fmaf(weight, stats.row_sum, row.row_sum);
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[e] = fmaf(weight, x[e], acc[e] * factor);
  }
};

// Which rows those of a block are: of all query heads of a sequence, head by head.
struct CombinedRow {
  int sequence, head, query;

  __device__ __forceinline__ CombinedRow(const AttentionParams& p, unsigned index) {
    const auto queries = static_cast<unsigned>(p.seqlen_q);
    const unsigned of_all = index / queries;
    query = static_cast<int>(index - of_all * queries);
    sequence = static_cast<int>(of_all / static_cast<unsigned>(p.num_heads));
    head = static_cast<int>(of_all - sequence * static_cast<unsigned>(p.num_heads));
  }
};

template <typename T, int kHeadDim, int kVariant, int kKeyBytes>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ AttentionParams params,
                   const __grid_constant__ DecodeShape shape) {
  constexpr Shape kShape = shape_of(kHeadDim, kVariant, kKeyBytes);
  constexpr int kBlockM = block_m(kShape), kBlockN = block_n(kShape);
  constexpr int kLanes = kHeadDim / 4, kGroups = kCombineThreads / kLanes, kAtOnce = 8;
  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  const CombinedRow row(params, blockIdx.x);
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int column = static_cast<int>(threadIdx.x) % kLanes * 4;
  const RowBlocks blocks = RowBlocks::of<kBlockM, kBlockN>(params, shape, row.sequence);
  const int heads = static_cast<int>(shape.packed_heads.divisor());
  const int row_of_head = row.query * heads + row.head % heads;
  if (row.query >= Lengths(params, row.sequence).seqlen_q) return;

  RunningSum sum;
  if (blocks.tiles > 0) {
    constexpr int kBegin = tiles_to_begin(kBlockN);
    const DealtUnits dealt(params, shape, blocks, row.sequence, kBegin);
    const bool own_parts = by_parts(shape, dealt.part_tiles);
    const unsigned per = own_parts ? 1 : per_block(dealt.total, shape.num_blocks);
    const auto row_block =
        static_cast<unsigned>(row.head / heads * blocks.of_head + row_of_head / kBlockM);
    const unsigned begin = dealt.before + row_block * dealt.of_block;
    const unsigned start = own_parts ? begin : begin + kBegin;
    const unsigned first = start / per, last = (begin + dealt.of_block - 1) / per;
    if (first == last) return;
    // Several at a time, so that their loads are on their way together.
#pragma unroll 1
    for (unsigned block = first + group; block <= last; block += kAtOnce * kGroups) {
      PartStats stats[kAtOnce];
      float x[kAtOnce][4];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const unsigned of = min(block + i * kGroups, last);
        const unsigned part = own_parts ? of : part_of(of, per, start);
        const std::int64_t at = std::int64_t{part} * kBlockM + row_of_head % kBlockM;
        stats[i] = static_cast<const PartStats*>(shape.stats)[at];
        tile::load(x[i], shape.outs + at * kHeadDim + column);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (block + i * kGroups <= last) sum.add(stats[i], x[i]);
      }
    }
  }
  // [kGroups][kLanes] of four sums, then [kGroups] of statistics.
  auto* const sums = reinterpret_cast<tile::Vec<float, 4>*>(ptx::dynamic_smem());
  auto* const stats = reinterpret_cast<PartStats*>(sums + kCombineThreads);
  tile::store(sums[threadIdx.x].x, sum.acc);
  if (column == 0) stats[group] = {sum.row.row_max, sum.row.row_sum};
  __syncthreads();
  if (group > 0) return;
  RunningSum all;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    float x[4];
    tile::load(x, sums[g * kLanes + threadIdx.x].x);
    all.add(stats[g], x);
  }
  const ResultRow<T> to(params, row.sequence, row.head, row.query);
  const float of_values = value_scale<kKeyBytes>(params, row.sequence, row.head / heads);
  const tile::RowResult result = finalize({all.row.row_max, all.row.row_sum}, to.sink, of_values);
  if (to.lse && column == 0) *to.lse = result.lse;
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    store_pair(to.out, column + e, tile::scaled(all.acc[e], result.scale),
               tile::scaled(all.acc[e + 1], result.scale), static_cast<int>(params.head_dim_v),
               shape.store_bytes);
  }
}

}  // namespace dlattn::decode
