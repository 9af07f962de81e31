#pragma once

#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/tile/key_parts/sequence.cuh"
#include "cuda/tile/warp.cuh"

// How the work is partitioned. A row block is kBlockM rows of a KV head of a sequence, with the
// tiles of keys that a row of the sequence sees. It is made of units, which are numbered sequence
// by sequence, head by head, row block by row block, and each thread block takes as many of them,
// one behind the other. A unit is
//   a row block         where thread blocks have whole ones (DecodeShape::whole), or clusters,
//                       whose blocks have as many tiles of it each;
//   a part of one       where the keys are split as the caller asks (split_tiles, num_splits), or
//                       where lengths are so much alike that parts of one size, a thread block
//                       each, end soonest (work_partition.h): each unit leaves a part of its own;
//   a tile              else: thread blocks end together whatever the lengths are. Before its tiles
//                       a row block has units for what it takes to begin one.
namespace dlattn::tile::key_parts {

// Before a block's first access to global memory; again it does nothing. Compute everything that
// needs no global memory first.
__device__ __forceinline__ void begin_access() {
  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
}

// Asks for the lists of a problem to be brought to L2 while the grids ahead are waited for:
// gigabytes of keys may have passed through it since the last call, and one list is read after the
// other. Each thread of the grid asks for a line.
__device__ __forceinline__ void ask_for_lists(const AttentionParams& p, const DecodeShape& shape) {
  if constexpr (!ptx::kStartsEarly) return;
  constexpr std::int64_t kOfLine = 128 / sizeof(std::int32_t);
  const std::int64_t first = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kOfLine;
  const auto ask = [first](const std::int32_t* list, std::int64_t count) {
    if (list && first < count) ptx::prefetch_to_l2(list + first);
  };
  ask(p.seqused_k, p.batch_size);
  ask(p.cu_seqlens_q, p.batch_size + 1);
  const unsigned last_key = static_cast<unsigned>(max(p.seqlen_k, std::int64_t{1})) - 1;
  ask(p.page_table.data,
      (p.batch_size - 1) * p.page_table.batch_stride + shape.page_size.quotient(last_key) + 1);
}

// Whether units are parts that the caller asks for.
__device__ __forceinline__ bool is_split(const DecodeShape& shape) {
  return shape.split_tiles > 0 || shape.num_splits > 0;
}

// Whether every unit leaves a part of its own.
__device__ __forceinline__ bool by_parts(const DecodeShape& shape, int part_tiles) {
  return is_split(shape) || part_tiles > 0;
}

// The row blocks of a sequence. kPairs: the blocks of a cluster may have one each, side by side
// (DecodeShape::pair_log2), which count as one here.
struct RowBlocks {
  int of_head;  // of each KV head
  int tiles;    // of keys, the same for all of them
  int first_tile;

  template <int kBlockM, int kBlockN, bool kPairs = false>
  __device__ __forceinline__ static RowBlocks of(const AttentionParams& p, const DecodeShape& shape,
                                                 int sequence) {
    return of<kBlockM, kBlockN, kPairs>(p, shape, Lengths(p, sequence));
  }
  template <int kBlockM, int kBlockN, bool kPairs = false>
  __device__ __forceinline__ static RowBlocks of(const AttentionParams& p, const DecodeShape& shape,
                                                 const Lengths& lengths) {
    const int rows = lengths.rows(shape);
    const tile::Range tiles =
        tiles_of(lengths.mask(p, shape).any_row(0, max(rows - 1, 0)), kBlockN);
    RowBlocks blocks{};
    blocks.of_head = (rows + kBlockM - 1) / kBlockM;
    if constexpr (kPairs)
      blocks.of_head = (blocks.of_head + (1 << shape.pair_log2) - 1) >> shape.pair_log2;
    blocks.tiles = rows > 0 ? max(tiles.end - tiles.begin, 0) : 0;
    blocks.first_tile = tiles.begin;
    return blocks;
  }
  __device__ __forceinline__ int end() const { return first_tile + tiles; }
  __device__ __forceinline__ unsigned count(const AttentionParams& p) const {
    return static_cast<unsigned>(p.num_heads_kv) * static_cast<unsigned>(of_head);
  }
  // The tiles of a unit, at most, where units are parts. `part_tiles`: as in DecodeShape.
  __device__ __forceinline__ int unit_tiles(const DecodeShape& shape, int part_tiles) const {
    if (shape.whole) return max(tiles, 1);
    if (shape.num_splits > 0) return max((tiles + shape.num_splits - 1) / shape.num_splits, 1);
    return shape.split_tiles > 0 ? shape.split_tiles : max(part_tiles, 1);
  }
  // The tile where the first unit would begin, were all its keys seen.
  __device__ __forceinline__ int origin(const DecodeShape& shape) const {
    return shape.split_tiles > 0 ? first_tile - first_tile % shape.split_tiles : first_tile;
  }
  // The units of each row block; none if it sees nothing, unless it is whole. `begin`: units for
  // beginning.
  __device__ __forceinline__ int units_of_block(const DecodeShape& shape, int part_tiles,
                                                int begin) const {
    if (shape.whole) return 1;
    if (tiles == 0) return 0;
    if (!is_split(shape) && part_tiles == 0) return begin + tiles;
    const int each = unit_tiles(shape, part_tiles);
    return (end() - origin(shape) + each - 1) / each;
  }
};

// A row block, and the tiles of it that a thread block has.
struct Segment {
  int sequence, head_kv, row_block;
  int tile, count;  // numbered from key 0 on
  int part;         // which part of the workspace they are for; negative: none, as these are all

  __device__ __forceinline__ bool is_none() const { return sequence < 0; }
  __device__ __forceinline__ bool is_complete() const { return part < 0; }
};

// Which cluster of the grid the caller is in, or which block where there are none, and which block
// of its cluster it is.
__device__ __forceinline__ unsigned cluster_or_block(const DecodeShape& shape) {
  return ptx::kClusters ? blockIdx.x >> shape.cluster_log2 : blockIdx.x;
}
__device__ __forceinline__ unsigned rank_in_cluster(const DecodeShape& shape) {
  return blockIdx.x & ((1u << shape.cluster_log2) - 1);
}

// Whether the two parts of a row block, with that unit the first, are a cluster's, which joins
// them.
__device__ __forceinline__ bool is_joined(const DecodeShape& shape, int part_tiles, unsigned units,
                                          unsigned first) {
  return shape.joins && !is_split(shape) && part_tiles > 0 && units == 2 && first % 2 == 0;
}

// Which of the row blocks side by side is the caller's.
__device__ __forceinline__ unsigned rank_in_pair(const DecodeShape& shape) {
  return blockIdx.x & ((1u << shape.pair_log2) - 1);
}

// Where keys are divided evenly a thread block has at most two parts: one of a row block that began
// before its own units, which has the block's number, and one of a row block that goes on behind
// them, so many further. All parts of a row block but its first are one behind the other then.
__device__ __forceinline__ unsigned part_behind(const DecodeShape& shape) {
  return shape.num_blocks.divisor();
}

__device__ __forceinline__ unsigned per_block(unsigned total, const DecodeShape& shape) {
  return shape.num_blocks.quotient(total - 1) + 1;  // of no units, any number
}

// How the work was partitioned, as the combine kernel needs to know for a sequence.
struct Partition {
  int part_tiles;
  unsigned total;         // of all sequences
  unsigned before;        // of those before one
  unsigned of_block = 0;  // of each of its row blocks

  // Reads what the kernel that walks the keys has written, which takes its time: to be called
  // early.
  __device__ __forceinline__ static Partition written(const AttentionParams& p,
                                                      const DecodeShape& shape, int sequence) {
    if (shape.uniform) return {shape.part_tiles, 0, 0};
    return {static_cast<int>(shape.starts[p.batch_size + 1]), shape.starts[p.batch_size],
            shape.starts[sequence]};
  }
  // Whether every row block is one part and has keys, as is written in place of the total: nothing
  // is left to be added up.
  static constexpr std::uint32_t kComplete = 0xffffffff;
  __device__ __forceinline__ static bool is_complete(const AttentionParams& p,
                                                     const DecodeShape& shape) {
    return !shape.uniform && shape.starts[p.batch_size] == kComplete;
  }
  // `blocks`: those of the sequence.
  __device__ __forceinline__ void set_blocks(const AttentionParams& p, const DecodeShape& shape,
                                             const RowBlocks& blocks, int sequence, int begin) {
    of_block = static_cast<unsigned>(blocks.units_of_block(shape, part_tiles, begin));
    if (!shape.uniform) return;
    const unsigned each = blocks.count(p) * of_block;
    total = static_cast<unsigned>(p.batch_size) * each;
    before = static_cast<unsigned>(sequence) * each;
  }
};

// The walk through a thread block's units. All lanes of all warps do the same.
//
// Almost all of it runs once or twice a call, on instructions that other kernels and gigabytes of
// keys have driven out of every cache since: each function below is called in one place.
template <int kBlockM, int kBlockN, bool kPairs = false>
class DecodeSchedule {
 public:
  static constexpr int kBegin =
      fixed_overhead_tiles(kBlockN);  // units of a row block before its tiles
  // Whether an only sequence is found without a search. Not where registers are scarce, as they are
  // where tiles have so few keys.
  static constexpr bool kFindsOnly = kBlockN > 32;
  // Whether each lane keeps the row blocks of one of up to 32 sequences until its block's first one
  // is found, and whether anything is left to be added up is told. Not where registers are scarce
  // either.
  static constexpr bool kKeepsLane = !kPairs && kFindsOnly;

  __device__ __forceinline__ DecodeSchedule(const AttentionParams& p, const DecodeShape& shape,
                                            bool counts = true)
      : p_(p), shape_(shape), lane_(threadIdx.x % 32) {
    if (counts) begin(of_lane());
  }
  __device__ __forceinline__ static RowBlocks of(const AttentionParams& p, const DecodeShape& shape,
                                                 const Lengths& lengths) {
    return RowBlocks::of<kBlockM, kBlockN, kPairs>(p, shape, lengths);
  }
  // The lengths of the lane's sequence, or of the last one.
  __device__ __forceinline__ Lengths of_lane() const {
    return Lengths(p_, shape_.uniform ? 0 : min(lane_, sequences() - 1));
  }

  // Begins, or begins again, with the lengths of each lane's sequence.
  __device__ __forceinline__ void begin(const Lengths& of_lane) {
    sequence_ = -1;
    before_ = 0;
    total_ = count(of_lane);
    const unsigned per = per_block(total_, shape_);
    unit_ = min(index() * per, total_);
    end_ = min(unit_ + per, total_);
  }

  __device__ __forceinline__ bool is_complete() const { return is_complete_; }
  // As the combine kernel needs it, of up to 32 sequences.
  __device__ __forceinline__ Partition of_sequence(int sequence) const {
    const unsigned own = lane_ < sequence ? units(blocks_) : 0;
    return {part_tiles_, total_, __reduce_add_sync(tile::kFullMask, own)};
  }

  // Writes where every sequence begins, where the last one ends, and what was decided, for the
  // combine kernel.
  __device__ __forceinline__ void write_starts() const {
    if (threadIdx.x >= 32) return;
    unsigned before = 0;
    for (int base = 0; base < sequences(); base += 32) {
      const bool exists = base + lane_ < sequences();
      const unsigned own = exists ? units(of(base + lane_)) : 0, sum = inclusive_sum(own);
      if (exists) shape_.starts[base + lane_] = before + sum - own;
      before += __shfl_sync(tile::kFullMask, sum, 31);
    }
    if (lane_ > 0) return;
    shape_.starts[sequences()] = is_complete_ ? Partition::kComplete : before;
    shape_.starts[sequences() + 1] = static_cast<unsigned>(part_tiles_);
  }

  // Whether the last segment is to be joined with the part that the cluster's other block has,
  // which is all the rest.
  __device__ __forceinline__ bool joined() const { return joined_; }

  // The next segment, or none.
  __device__ __forceinline__ Segment next() {
    Segment segment{};
    do {
      segment.sequence = -1;
      if (unit_ >= end_) return segment;
      take(&segment);
      // Beginning a row block counts as units too, and these may be all that this thread block has
      // of it.
    } while (segment.count <= 0 && !shape_.whole);
    return segment;
  }

 private:
  // The segment that begins with unit_.
  __device__ __forceinline__ void take(Segment* segment) {
    find();
    const unsigned within = unit_ - before_;
    const auto units = static_cast<unsigned>(blocks_.units_of_block(shape_, part_tiles_, kBegin));
    const unsigned row_block = units == 1 ? within : within / units;
    const unsigned unit = within - row_block * units;
    // Divisions that few problems need cost a thread block its first hundreds of cycles.
    const auto of_head = static_cast<unsigned>(blocks_.of_head);
    const unsigned head = of_head == 1 ? row_block : row_block / of_head;
    segment->sequence = sequence_;
    segment->head_kv = static_cast<int>(head);
    segment->row_block = static_cast<int>(row_block) - segment->head_kv * blocks_.of_head;
    unsigned count = 1;
    int begin, end;
    if (shape_.whole || by_parts(shape_, part_tiles_)) {
      const int each = blocks_.unit_tiles(shape_, part_tiles_);
      begin = blocks_.origin(shape_) + static_cast<int>(unit) * each;
      end = begin + each;
      segment->part = static_cast<int>(unit_);
      if constexpr (kPairs) joined_ = is_joined(shape_, part_tiles_, units, unit_ - unit);
    } else {
      count = min(units - unit, end_ - unit_);
      begin = blocks_.first_tile + static_cast<int>(unit) - kBegin;
      end = begin + static_cast<int>(count);
      const bool begins = begin <= blocks_.first_tile;
      segment->part =
          static_cast<int>((kPairs ? index() : blockIdx.x) + (begins ? part_behind(shape_) : 0));
    }
    segment->tile = max(begin, blocks_.first_tile);
    segment->count = min(end, blocks_.end()) - segment->tile;
    if (segment->count == blocks_.tiles) segment->part = -1;
    if constexpr (kPairs) {
      const int log2 = shape_.pair_log2, rank = static_cast<int>(rank_in_pair(shape_));
      segment->row_block = (segment->row_block << log2) + rank;
      if (segment->part >= 0) segment->part = (segment->part << log2) + rank;
    } else if constexpr (ptx::kClusters) {
      if (shape_.cluster_log2 > 0) share_out(segment);
    }
    unit_ += count;
  }

  // Which of those among whom units are divided.
  __device__ __forceinline__ unsigned index() const {
    return kPairs ? blockIdx.x >> shape_.pair_log2 : cluster_or_block(shape_);
  }

  // A whole row block's tiles among the blocks of the cluster: what this one has of them, which may
  // be none.
  __device__ __forceinline__ void share_out(Segment* segment) const {
    const int size = 1 << shape_.cluster_log2, all = segment->count;
    const int each = (all + size - 1) >> shape_.cluster_log2;
    const int before = min(static_cast<int>(rank_in_cluster(shape_)) * each, all);
    segment->tile += before;
    segment->count = min(each, all - before);
  }

  __device__ __forceinline__ int sequences() const { return static_cast<int>(p_.batch_size); }
  __device__ __forceinline__ RowBlocks of(int sequence) const {
    return of(p_, shape_, Lengths(p_, sequence));
  }
  __device__ __forceinline__ unsigned units(const RowBlocks& blocks) const {
    return blocks.count(p_) *
           static_cast<unsigned>(blocks.units_of_block(shape_, part_tiles_, kBegin));
  }
  __device__ __forceinline__ unsigned inclusive_sum(unsigned x) const {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned below = __shfl_up_sync(tile::kFullMask, x, step);
      if (lane_ >= step) x += below;
    }
    return x;
  }

  // The units of all sequences, when it is decided by their lengths what a unit is. Every thread
  // block does this before its first copy. Afterwards blocks_ are those of an only sequence, or of
  // each if they are alike.
  __device__ __forceinline__ unsigned count(Lengths lengths) {
    const int looked_at = shape_.uniform ? 1 : sequences();
    bool decides = !shape_.uniform && !shape_.whole && !is_split(shape_);
    part_tiles_ = decides ? 0 : shape_.part_tiles;
#pragma unroll 1
    for (bool again = false;; again = true) {
      unsigned row_blocks = 0, tiles = 0, most = 0, total = 0, least = ~0u;
#pragma unroll 1
      for (int base = 0; base < looked_at; base += 32) {
        if (!kKeepsLane || looked_at > 32) lengths = Lengths(p_, min(base + lane_, looked_at - 1));
        if (!kKeepsLane || looked_at > 32 || !again) blocks_ = of(p_, shape_, lengths);
        const bool exists = base + lane_ < looked_at;
        const unsigned own = exists && blocks_.tiles > 0 ? blocks_.count(p_) : 0;
        const unsigned each = exists ? static_cast<unsigned>(blocks_.tiles) : 0;
        row_blocks += __reduce_add_sync(tile::kFullMask, own);
        tiles += __reduce_add_sync(tile::kFullMask, own * each);
        most = max(most, __reduce_max_sync(tile::kFullMask, each));
        if constexpr (kKeepsLane)
          least = min(least, __reduce_min_sync(tile::kFullMask, exists ? each : ~0u));
        total += __reduce_add_sync(tile::kFullMask, exists ? units(blocks_) : 0);
      }
      if (decides) {
        decides = false;
        part_tiles_ = part_tiles(shape_.num_blocks, kBegin, row_blocks, tiles, most);
        if constexpr (kKeepsLane) is_complete_ = static_cast<int>(most) <= part_tiles_ && least > 0;
        if (part_tiles_ > 0) continue;
      }
      return shape_.uniform ? static_cast<unsigned>(p_.batch_size) * total : total;
    }
  }

  // Moves to the sequence that has unit_.
  __device__ __forceinline__ void find() {
    const bool alike = shape_.uniform || (kFindsOnly && sequences() == 1);  // as blocks_
    const int last = sequence_;
    if (alike || last >= 0) {
      const unsigned each = units(blocks_);
      if (alike) {
        sequence_ = sequences() == 1 ? 0 : static_cast<int>(unit_ / each);
        before_ = static_cast<unsigned>(sequence_) * each;
        return;
      }
      if (unit_ < before_ + each) return;
      before_ += each;  // from the one behind on
    }
#pragma unroll 1
    for (int base = last + 1; sequence_ == last; base += 32) {
      // The first time, of few sequences, each lane has those of one.
      RowBlocks own = blocks_;
      if (!kKeepsLane || last >= 0 || sequences() > 32)
        own = of(min(base + lane_, sequences() - 1));
      const unsigned count = base + lane_ < sequences() ? units(own) : 0;
      const unsigned sum = inclusive_sum(count);
      const unsigned has = __ballot_sync(tile::kFullMask, before_ + sum > unit_);
      const int lane = has != 0 ? __ffs(static_cast<int>(has)) - 1 : 31;
      const unsigned all = __shfl_sync(tile::kFullMask, sum, lane);
      if (has == 0) {
        before_ += all;
        continue;
      }
      sequence_ = base + lane;
      before_ += all - __shfl_sync(tile::kFullMask, count, lane);
      blocks_.of_head = __shfl_sync(tile::kFullMask, own.of_head, lane);
      blocks_.tiles = __shfl_sync(tile::kFullMask, own.tiles, lane);
      blocks_.first_tile = __shfl_sync(tile::kFullMask, own.first_tile, lane);
    }
  }

  const AttentionParams& p_;
  const DecodeShape& shape_;
  const int lane_;
  int part_tiles_ = 0;
  bool is_complete_ = false;
  bool joined_ = false;
  unsigned total_ = 0, unit_ = 0, end_ = 0;
  int sequence_ = -1;    // none yet
  unsigned before_ = 0;  // units of the sequences before
  RowBlocks blocks_{};   // of the sequence; of all if they are alike
};

}  // namespace dlattn::tile::key_parts
