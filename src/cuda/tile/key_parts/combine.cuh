#pragma once

// Adds up the parts of rows of out that several thread blocks have left in the workspace.
//
// A thread block per piece of a row of out (combine_columns()), or for several of these, side by
// side or one after the other, where there are many. Its threads form groups, each of which has
// these columns, four a thread, of every so many-th part; at the end the groups' sums are added up
// in shared memory. Rows that one thread block had all keys of are done already, and rows that see
// no key get their result here.

#include "cuda/ptx/fence.cuh"
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

// Where the parts of a row are: one behind the other, but for the first.
struct PartsOfRow {
  bool is_done = false;         // none, and nothing is left to do
  unsigned first = 0, end = 0;  // by thread block, or by unit where each has a part of its own
  unsigned to_first = 0;        // so many parts behind its number the first one lies
  int row_of_block = 0;
  int pair_log2 = 0, rank = 0;  // of row blocks side by side

  __device__ __forceinline__ int count() const { return static_cast<int>(end - first); }

  template <int kBlockM, int kBlockN, bool kPairs = false>
  __device__ __forceinline__ static PartsOfRow of(const AttentionParams& params,
                                                  const DecodeShape& shape, const CombinedRow& row,
                                                  Partition schedule) {
    constexpr int kBegin = fixed_overhead_tiles(kBlockN);
    PartsOfRow parts;
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
      const bool own = by_parts(shape, schedule.part_tiles);
      const unsigned per = own ? 1 : per_block(schedule.total, shape);
      const unsigned begin =
          schedule.before +
          static_cast<unsigned>(head_kv * blocks.of_head + row_block) * schedule.of_block;
      parts.first = (own ? begin : begin + kBegin) / per;
      parts.end = (begin + schedule.of_block - 1) / per + 1;
      parts.to_first = own ? 0 : part_behind(shape);
      parts.is_done = parts.end - parts.first == 1;
      if constexpr (kPairs) {
        parts.is_done =
            parts.is_done || is_joined(shape, schedule.part_tiles, schedule.of_block, begin);
      }
      parts.row_of_block = row_of_head % kBlockM;
    }
    return parts;
  }
};

// Adds up the parts of a row, in columns from `first_column` on, four a lane: a thread block has
// kLanes lanes a group, and each group every so many-th part. What needs no memory is worked out
// when it is made, which may be before the wait for the grid ahead; then one round trip to memory
// brings all that several parts a group have.
template <typename T, int kHeadDim, int kBlockM, int kKeyBytes, int kLanes, bool kPairs = false,
          int kGroups = kCombineThreads / kLanes>
class RowOfParts {
 public:
  __device__ __forceinline__ RowOfParts(const AttentionParams& params, const DecodeShape& shape,
                                        const CombinedRow& row, const PartsOfRow& parts,
                                        int first_column)
      : params_(params),
        shape_(shape),
        row_(row),
        parts_(parts),
        group_(kGroups == 1 ? 0 : static_cast<int>(threadIdx.x) / kLanes),
        lane_(static_cast<int>(threadIdx.x) % kLanes),
        column_(first_column + lane_ * 4),
        to_(params, row.sequence, row.head, row.query) {
    const int log2 = kPairs ? parts.pair_log2 : 0, rank = kPairs ? parts.rank : 0;
    const unsigned first = ((parts.first + static_cast<unsigned>(group_)) << log2) + rank;
    const std::int64_t at = std::int64_t{first} * kBlockM + parts.row_of_block;
    const std::int64_t further = group_ == 0 ? std::int64_t{parts.to_first << log2} * kBlockM : 0;
    const int of_lane = lane_ % kAtOnce;
    stats_ = static_cast<const PartStats*>(shape.stats) + at + of_lane * next();
    first_stats_ = stats_ + (of_lane == 0 ? further : 0);
    out_ = shape.outs + at * kColumns + column_;
    first_out_ = out_ + further * kColumns;
  }

  __device__ __forceinline__ void add_up() {
    const float of_values = value_scale<kKeyBytes>(
        params_, row_.sequence, row_.head / static_cast<int>(shape_.packed_heads.divisor()));
    RunningSum sum;
    const PartStats *stats = stats_, *first_stats = first_stats_;
    const float *out = out_, *first_out = first_out_;
#pragma unroll 1
    for (int left = static_cast<int>(parts_.end - parts_.first); left > 0;
         left -= kAtOnce * kGroups) {
      const int count = (left - group_ + kGroups - 1) / kGroups;
      PartStats of_lane{};
      if (lane_ % kAtOnce < count) of_lane = *first_stats;
      float x[kAtOnce][4];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i < count) tile::load(x[i], i == 0 ? first_out : out + i * next() * kColumns);
      }
      stats += kAtOnce * next(), first_stats = stats;
      out += kAtOnce * next() * kColumns, first_out = out;
      sum.add(of_lane, x, count);
    }
    sum.row.row_sum = tile::reduce_sum<kAtOnce>(sum.row.row_sum);
    if constexpr (kGroups == 1) {
      store(sum, of_values);
    } else {
      // [kGroups][kLanes] of four sums, then [kGroups] of statistics.
      auto* const sums = reinterpret_cast<tile::Vec<float, 4>*>(ptx::dynamic_smem());
      auto* const stats = reinterpret_cast<PartStats*>(sums + kCombineThreads);
      tile::store(sums[threadIdx.x].x, sum.acc);
      if (lane_ == 0) stats[group_] = {sum.row.row_max, sum.row.row_sum};
      __syncthreads();
      if (group_ > 0) return;
      PartStats of_groups[kGroups];
      float x[kGroups][4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        of_groups[g] = stats[g];
        tile::load(x[g], sums[g * kLanes + lane_].x);
      }
      store(RunningSum::of(of_groups, x), of_values);
    }
  }

  // The same of up to kMost parts by a group alone, with the bits that as many groups have of a
  // part each (RunningSum::of()): whatever the batch is, a row's parts are added up alike.
  template <int kMost>
  __device__ __forceinline__ void add_up_few() {
    static_assert(kGroups == 1 && kMost == kAtOnce);
    const float of_values = value_scale<kKeyBytes>(
        params_, row_.sequence, row_.head / static_cast<int>(shape_.packed_heads.divisor()));
    const int count = parts_.count();
    PartStats of_lane = {-INFINITY, 0.0f};
    if (lane_ % kMost < count) of_lane = *first_stats_;
    RunningSum sum;
    const float* out = out_;
    // Half of them at a time, as registers are few.
    constexpr int kHalf = kMost / 2;
#pragma unroll 1
    for (int first = 0; first < count; first += kHalf) {
      float x[kHalf][4] = {};
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        if (first + i < count)
          tile::load(x[i], first + i == 0 ? first_out_ : out + i * next() * kColumns);
      }
      if (first == 0) {
        sum.row.row_max = tile::reduce_max<kMost>(of_lane.row_max);
        of_lane.row_max = sum.row.probability(of_lane.row_max, 1.0f);
      }
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float weight = __shfl_sync(tile::kFullMask, of_lane.row_max, first + i, kMost);
        const float row_sum = __shfl_sync(tile::kFullMask, of_lane.row_sum, first + i, kMost);
        sum.row.row_sum = fmaf(weight, row_sum, sum.row.row_sum);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.acc[e] = fmaf(weight, x[i][e], sum.acc[e]);
      }
      out += kHalf * next() * kColumns;
    }
    store(sum, of_values);
  }

 private:
  static constexpr int kColumns = out_columns(kHeadDim);
  // Parts of a group at once: 32 of all groups, and 8 of an only one.
  static constexpr int kAtOnce = kGroups == 1 ? 8 : 32 / kGroups;

  // Rows from one of a group's parts to the next.
  __device__ __forceinline__ int next() const {
    return kGroups * kBlockM << (kPairs ? parts_.pair_log2 : 0);
  }

  __device__ __forceinline__ void store(const RunningSum& all, float of_values) const {
    const auto result = [&] {
      return finalize({all.row.row_max, all.row.row_sum}, to_.sink, of_values);
    };
    const float scale = result().scale;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      store_pair(to_.out, column_ + e, tile::scaled(all.acc[e], scale),
                 tile::scaled(all.acc[e + 1], scale), static_cast<int>(params_.head_dim_v),
                 shape_.store_bytes);
    }
    if (to_.lse && column_ == 0) *to_.lse = result().lse;  // its logarithm is worked out here alone
  }

  const AttentionParams& params_;
  const DecodeShape& shape_;
  const CombinedRow& row_;
  const PartsOfRow& parts_;
  const int group_, lane_, column_;
  const ResultRow<T> to_;
  // The group's parts. One of each kAtOnce lanes has the statistics of one of them, and all lanes
  // have four columns of each. first_*: of the first, which may lie further on.
  const PartStats *stats_, *first_stats_;
  const float *out_, *first_out_;
};

// The most sequences whose lengths a thread block reads once more while it waits, to know how the
// work is partitioned when it adds up, rather than read then what the keys' kernel has written.
// Where there are more, most thread blocks begin when there is nothing to wait for.
constexpr std::int64_t kMostCounted = 16;

// The kernel of a family whose thread blocks have row blocks of kBlockM rows and tiles of kBlockN
// keys, of elements of kKeyBytes.
template <typename T, int kHeadDim, int kBlockM, int kBlockN, int kKeyBytes>
__device__ __forceinline__ void combine_row(const AttentionParams& params,
                                            const DecodeShape& shape) {
  constexpr int kColumns = combine_columns(kHeadDim);
  constexpr unsigned kBlocks = combine_blocks(kHeadDim);
  ptx::let_next_grid_start_before_wait();
  // The grid ahead of both may compute the lengths: the keys' kernel has waited for it.
  const bool counts = ptx::kStartsEarly && !shape.uniform && params.batch_size <= kMostCounted;
  if (counts) ptx::see_as_grid_ahead();
  const bool waits = shape.uniform || counts;
  if (!waits) ptx::wait_for_grids_ahead();
  const DecodeSchedule<kBlockM, kBlockN> schedule(params, shape, counts);
  const bool nothing = counts ? schedule.is_complete() : Partition::is_complete(params, shape);
  // Where there are fewer blocks than pieces of rows, a block has several rows side by side, each
  // by threads of its own, and those of many parts by all of them afterwards. Rows that it has at a
  // time are far from each other, as those of a long sequence are neighbours.
  constexpr int kLanes = kHeadDim / 4, kRows = rows_side_by_side(kHeadDim);
  // As many as there are groups for a piece: so a row has the same bits wherever it is added up.
  constexpr int kFewParts = kCombineThreads / (kColumns / 4);
  const auto pieces = static_cast<unsigned>(rows_to_combine(params, kHeadDim));
  const unsigned rows = pieces / kBlocks;
  const bool beside = kRows > 1 && gridDim.x < pieces;
  const unsigned items = beside ? (rows + kRows - 1) / kRows : pieces;
  // Behind what a row's sums take.
  auto* const of_rows = reinterpret_cast<PartsOfRow*>(ptx::dynamic_smem() + kCombineThreads * 20);
  static_assert(kCombineThreads * 20 + kRows * sizeof(PartsOfRow) <= combine_smem_bytes());
#pragma unroll 1
  for (unsigned item = blockIdx.x; item < items && !nothing; item += gridDim.x) {
    const unsigned index = beside ? item + threadIdx.x / kLanes * items : item / kBlocks;
    CombinedRow row(params, min(index, rows - 1));
    PartsOfRow parts =
        PartsOfRow::of<kBlockM, kBlockN>(params, shape, row,
                                         counts ? schedule.of_sequence(row.sequence)
                                                : Partition::written(params, shape, row.sequence));
    unsigned piece = item % kBlocks, end = piece + 1;
    if (beside) {
      if (index >= rows) parts.is_done = true;
      const bool few = parts.count() <= kFewParts;
      if (threadIdx.x % kLanes == 0) of_rows[threadIdx.x / kLanes] = parts;
      __syncthreads();
      if constexpr (kRows > 1) {
        RowOfParts<T, kHeadDim, kBlockM, kKeyBytes, kLanes, false, 1> adder(params, shape, row,
                                                                            parts, 0);
        ptx::wait_for_grids_ahead();
        if (!parts.is_done && few) adder.template add_up_few<kFewParts>();
      }
      piece = 0, end = kRows * kBlocks;
    }
#pragma unroll 1
    for (; piece < end; ++piece) {
      if (beside) {
        parts = of_rows[piece / kBlocks];
        if (parts.is_done || parts.count() <= kFewParts) continue;
        row = CombinedRow(params, item + piece / kBlocks * items);
      }
      RowOfParts<T, kHeadDim, kBlockM, kKeyBytes, kColumns / 4> adder(
          params, shape, row, parts, static_cast<int>(piece % kBlocks) * kColumns);
      if (waits) ptx::wait_for_grids_ahead();
      if (!parts.is_done) adder.add_up();
      __syncthreads();  // the next row's sums come to the same memory
    }
    __syncthreads();
  }
  ptx::wait_for_grids_ahead();
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
  PartsOfRow parts = PartsOfRow::of<kBlockM, kBlockN, true>(
      params, shape, row(0), Partition::written(params, shape, sequence));
  if (shape.uniform) ptx::wait_for_grids_ahead();
  if (parts.is_done) return;
  const int num_rows = min(Lengths(params, sequence).rows(shape) - first_row, kBlockM);
  if (parts.end - parts.first <= kFewParts) {
#pragma unroll 1
    for (int i = slice; i < num_rows; i += slices) {
      parts.row_of_block = i;
      const CombinedRow at = row(i);
      RowOfParts<T, kHeadDim, kBlockM, kKeyBytes, kCombineThreads, true>(params, shape, at, parts,
                                                                         0)
          .add_up();
    }
    return;
  }
#pragma unroll 1
  for (int i = slice; i < num_rows * kChunks; i += slices) {
    parts.row_of_block = i / kChunks;
    const CombinedRow at = row(i / kChunks);
    RowOfParts<T, kHeadDim, kBlockM, kKeyBytes, kColumns / 4, true>(params, shape, at, parts,
                                                                    i % kChunks * kColumns)
        .add_up();
    __syncthreads();  // the next one's sums come to the same memory
  }
}

}  // namespace dlattn::tile::key_parts
