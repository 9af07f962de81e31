#pragma once

// Adds up the parts of rows of out that several thread blocks have left in the workspace.
//
// A thread block per row of out, or per 128 columns of it, or for several of these one after the
// other, where there are more than the device has room for at once. Its threads form groups, each
// of which has these columns, four a thread, of every so many-th part; at the end the groups' sums
// are added up in shared memory. Rows that one thread block had all keys of are done already, and
// rows that see no key get their result here.

#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/tile/key_parts/parts.cuh"
#include "cuda/tile/key_parts/schedule.cuh"

namespace dlattn::tile::key_parts {

// Which rows those of a block are: of all query heads of a sequence, head by head.
struct CombinedRow {
  int sequence, head, query;

  __device__ __forceinline__ CombinedRow(int sequence, int head, int query)
      : sequence(sequence), head(head), query(query) {}
  __device__ __forceinline__ CombinedRow(const AttentionParams& p, unsigned index) {
    const auto queries = static_cast<unsigned>(p.seqlen_q);
    const unsigned of_all = index / queries;
    query = static_cast<int>(index - of_all * queries);
    sequence = static_cast<int>(of_all / static_cast<unsigned>(p.num_heads));
    head = static_cast<int>(of_all - sequence * static_cast<unsigned>(p.num_heads));
  }
};

// Where the parts of a row are.
struct PartsOfRow {
  bool is_done = false;         // none, and nothing is left to do
  bool own = false;             // each unit's is at its own number
  unsigned first = 0, end = 0;  // by thread block, or by unit if own
  unsigned per = 1, start = 0;  // as part_of() counts
  int row_of_block = 0;
  int pair_log2 = 0, rank = 0;  // of row blocks side by side

  template <int kBlockM, int kBlockN, bool kPairs = false>
  __device__ __forceinline__ static PartsOfRow of(const AttentionParams& params,
                                                  const DecodeShape& shape,
                                                  const CombinedRow& row) {
    constexpr int kBegin = fixed_overhead_tiles(kBlockN);
    PartsOfRow parts;
    WrittenSchedule schedule(params, shape, row.sequence);
    const RowBlocks blocks = RowBlocks::of<kBlockM, kBlockN, kPairs>(params, shape, row.sequence);
    if (row.query >= Lengths(params, row.sequence).seqlen_q) {
      parts.is_done = true;
    } else if (blocks.tiles > 0) {
      const int heads = static_cast<int>(shape.packed_heads.divisor());
      const int head_kv = row.head / heads;
      const int row_of_head = row.query * heads + row.head - head_kv * heads;
      int row_block = row_of_head / kBlockM;
      if constexpr (kPairs) {
        parts.pair_log2 = shape.pair_log2;
        parts.rank = row_block & ((1 << parts.pair_log2) - 1);
        row_block >>= parts.pair_log2;
      }
      schedule.set_blocks(params, shape, blocks, row.sequence, kBegin);
      parts.own = by_parts(shape, schedule.part_tiles);
      parts.per = parts.own ? 1 : per_block(schedule.total, shape.num_blocks);
      const unsigned begin =
          schedule.before +
          static_cast<unsigned>(head_kv * blocks.of_head + row_block) * schedule.of_block;
      parts.start = parts.own ? begin : begin + kBegin;
      parts.first = parts.start / parts.per;
      parts.end = (begin + schedule.of_block - 1) / parts.per + 1;
      parts.is_done = parts.end - parts.first == 1;
      if constexpr (kPairs) {
        parts.is_done =
            parts.is_done || is_joined(shape, schedule.part_tiles, schedule.of_block, begin);
      }
      parts.row_of_block = row_of_head % kBlockM;
    }
    return parts;
  }
  // The index of a row among the parts in the workspace.
  template <int kBlockM>
  __device__ __forceinline__ std::int64_t at(unsigned i) const {
    const unsigned part = own ? i : part_of(i, per, start);
    return std::int64_t{(part << pair_log2) + static_cast<unsigned>(rank)} * kBlockM + row_of_block;
  }
};

// Adds up the parts of a row, in columns from `first_column` on, four a lane: a thread block has
// kLanes lanes a group, and each group every so many-th part.
template <typename T, int kHeadDim, int kBlockM, int kKeyBytes, int kLanes>
__device__ __forceinline__ void add_up_row(const AttentionParams& params, const DecodeShape& shape,
                                           const CombinedRow& row, const PartsOfRow& parts,
                                           int first_column) {
  constexpr int kGroups = kCombineThreads / kLanes, kAtOnce = 8;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int column = first_column + lane * 4;
  RunningSum sum;
  // Several at a time, so that their loads are on their way together.
#pragma unroll 1
  for (unsigned part = parts.first + group; part < parts.end; part += kAtOnce * kGroups) {
    PartStats stats[kAtOnce];
    float x[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int64_t at = parts.at<kBlockM>(min(part + i * kGroups, parts.end - 1));
      stats[i] = static_cast<const PartStats*>(shape.stats)[at];
      tile::load(x[i], shape.outs + at * out_columns(kHeadDim) + column);
    }
    sum.add(stats, x, static_cast<int>((parts.end - part + kGroups - 1) / kGroups));
  }
  RunningSum all = sum;
  if constexpr (kGroups > 1) {
    // [kGroups][kLanes] of four sums, then [kGroups] of statistics.
    auto* const sums = reinterpret_cast<tile::Vec<float, 4>*>(ptx::dynamic_smem());
    auto* const stats = reinterpret_cast<PartStats*>(sums + kCombineThreads);
    tile::store(sums[threadIdx.x].x, sum.acc);
    if (lane == 0) stats[group] = {sum.row.row_max, sum.row.row_sum};
    __syncthreads();
    if (group > 0) return;
    PartStats of_groups[kGroups];
    float x[kGroups][4];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      of_groups[g] = stats[g];
      tile::load(x[g], sums[g * kLanes + lane].x);
    }
    all = RunningSum();
    all.add(of_groups, x, kGroups);
  }
  const ResultRow<T> to(params, row.sequence, row.head, row.query);
  const float of_values = value_scale<kKeyBytes>(
      params, row.sequence, row.head / static_cast<int>(shape.packed_heads.divisor()));
  const tile::RowResult result = finalize({all.row.row_max, all.row.row_sum}, to.sink, of_values);
  if (to.lse && column == 0) *to.lse = result.lse;
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    store_pair(to.out, column + e, tile::scaled(all.acc[e], result.scale),
               tile::scaled(all.acc[e + 1], result.scale), static_cast<int>(params.head_dim_v),
               shape.store_bytes);
  }
}

// The kernel of a family whose thread blocks have row blocks of kBlockM rows and tiles of kBlockN
// keys, of elements of kKeyBytes.
template <typename T, int kHeadDim, int kBlockM, int kBlockN, int kKeyBytes>
__device__ __forceinline__ void combine_row(const AttentionParams& params,
                                            const DecodeShape& shape) {
  constexpr int kColumns = combine_columns(kHeadDim);
  constexpr unsigned kBlocks = combine_blocks(kHeadDim);
  ptx::let_next_grid_start_before_wait();
  // The grid ahead of both may compute the lengths, and the kernel writes how it partitioned them.
  if (!shape.uniform) ptx::wait_for_grids_ahead();
  unsigned index = blockIdx.x;  // there is a row for each thread block
#pragma unroll 1
  do {
    const CombinedRow row(params, index / kBlocks);
    const PartsOfRow parts = PartsOfRow::of<kBlockM, kBlockN>(params, shape, row);
    ptx::wait_for_grids_ahead();
    if (!parts.is_done) {
      add_up_row<T, kHeadDim, kBlockM, kKeyBytes, kColumns / 4>(
          params, shape, row, parts, static_cast<int>(index % kBlocks) * kColumns);
    }
    __syncthreads();  // the next row's sums come to the same memory
    index += gridDim.x;
  } while (index < static_cast<unsigned>(rows_to_combine(params, kHeadDim)));
}

// The same where a KV head has many rows, and row blocks of which one thread block had all keys are
// to be passed over at once: `slices` thread blocks share each of as many row blocks as there are
// where all sequences are as long as the problem says. Where rows have few parts a thread block has
// all columns of a row, else some of them, in groups.
template <typename T, int kHeadDim, int kBlockM, int kBlockN, int kKeyBytes>
__device__ __forceinline__ void combine_row_block(const AttentionParams& params,
                                                  const DecodeShape& shape, int slices) {
  constexpr int kColumns = combine_columns(kHeadDim), kChunks = combine_blocks(kHeadDim);
  constexpr unsigned kFewParts = 8;
  static_assert(out_columns(kHeadDim) == 4 * kCombineThreads);
  ptx::let_next_grid_start_before_wait();
  const int heads = static_cast<int>(shape.packed_heads.divisor());
  const int block = static_cast<int>(blockIdx.x) / slices;
  const int slice = static_cast<int>(blockIdx.x) - block * slices;
  const int of_head = (static_cast<int>(params.seqlen_q) * heads + kBlockM - 1) / kBlockM;
  const int of_all = block / of_head, sequence = of_all / static_cast<int>(params.num_heads_kv);
  const int first_head = (of_all - sequence * static_cast<int>(params.num_heads_kv)) * heads;
  const int first_row = (block - of_all * of_head) * kBlockM;
  const auto row = [&](int i) {
    const auto at = static_cast<unsigned>(first_row + i);
    const auto query = static_cast<int>(shape.packed_heads.quotient(at));
    return CombinedRow(sequence, first_head + first_row + i - query * heads, query);
  };
  if (!shape.uniform) ptx::wait_for_grids_ahead();
  PartsOfRow parts = PartsOfRow::of<kBlockM, kBlockN, true>(params, shape, row(0));
  if (shape.uniform) ptx::wait_for_grids_ahead();
  if (parts.is_done) return;
  const int num_rows = min(Lengths(params, sequence).rows(shape) - first_row, kBlockM);
  if (parts.end - parts.first <= kFewParts) {
#pragma unroll 1
    for (int i = slice; i < num_rows; i += slices) {
      parts.row_of_block = i;
      add_up_row<T, kHeadDim, kBlockM, kKeyBytes, kCombineThreads>(params, shape, row(i), parts, 0);
    }
    return;
  }
#pragma unroll 1
  for (int i = slice; i < num_rows * kChunks; i += slices) {
    parts.row_of_block = i / kChunks;
    add_up_row<T, kHeadDim, kBlockM, kKeyBytes, kColumns / 4>(params, shape, row(i / kChunks),
                                                              parts, i % kChunks * kColumns);
    __syncthreads();  // the next one's sums come to the same memory
  }
}

}  // namespace dlattn::tile::key_parts
