#pragma once

#include "cuda/forward/decode/sequence.cuh"
#include "cuda/tile/warp.cuh"

// How the work is dealt. A row block is kBlockM rows of a KV head of a sequence; its units are the
// tiles of keys that a row of the sequence sees. Units are numbered sequence by sequence, head by
// head, row block by row block, tile by tile, and each thread block takes as many of them, one
// behind the other: so blocks end together whatever the lengths are. Where they have whole row
// blocks (DecodeShape::whole), a row block is one unit. Where the keys are split as the caller asks
// (split_tiles, num_splits), a unit is the tiles of a part, and each leaves a part of its own.
namespace dlattn::decode {

// Whether units are parts that the caller asks for.
__device__ __forceinline__ bool is_split(const DecodeShape& shape) {
  return shape.split_tiles > 0 || shape.num_splits > 0;
}

// The row blocks of a sequence.
struct RowBlocks {
  int of_head;  // of each KV head
  int tiles;    // of keys, the same for all of them
  int first_tile;

  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ static RowBlocks of(const AttentionParams& p, const DecodeShape& shape,
                                                 int sequence) {
    const Lengths lengths(p, sequence);
    const int rows = lengths.rows(shape);
    const tile::Range tiles =
        tiles_of(lengths.mask(p, shape).any_row(0, max(rows - 1, 0)), kBlockN);
    RowBlocks blocks{};
    blocks.of_head = (rows + kBlockM - 1) / kBlockM;
    blocks.tiles = rows > 0 ? max(tiles.end - tiles.begin, 0) : 0;
    blocks.first_tile = tiles.begin;
    return blocks;
  }
  __device__ __forceinline__ int end() const { return first_tile + tiles; }
  // The tiles of a unit, at most.
  __device__ __forceinline__ int unit_tiles(const DecodeShape& shape) const {
    if (shape.whole) return max(tiles, 1);
    if (shape.num_splits > 0) return max((tiles + shape.num_splits - 1) / shape.num_splits, 1);
    return max(shape.split_tiles, 1);
  }
  // The tile where the first unit would begin, were all its keys seen.
  __device__ __forceinline__ int origin(const DecodeShape& shape) const {
    return shape.split_tiles > 0 ? first_tile - first_tile % shape.split_tiles : first_tile;
  }
  // Of each row block; none if it sees nothing, unless it is whole.
  __device__ __forceinline__ int units_of_block(const DecodeShape& shape) const {
    if (shape.whole) return 1;
    if (!is_split(shape) || tiles == 0) return tiles;
    const int each = unit_tiles(shape);
    return (end() - origin(shape) + each - 1) / each;
  }
  __device__ __forceinline__ unsigned units(const AttentionParams& p,
                                            const DecodeShape& shape) const {
    return static_cast<unsigned>(p.num_heads_kv) * static_cast<unsigned>(of_head) *
           static_cast<unsigned>(units_of_block(shape));
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

// Where part `block` of a row block goes whose first unit is `start`: a thread block has at most
// one that began before its own units, and one that goes on behind them.
__device__ __forceinline__ unsigned part_of(unsigned block, unsigned per_block, unsigned start) {
  return 2 * block + (start < block * per_block ? 0 : 1);
}

__device__ __forceinline__ unsigned per_block(unsigned total, unsigned num_blocks) {
  return (total + num_blocks - 1) / num_blocks;
}

// The units of all sequences before one, when the kernel that walks the keys is done.
__device__ __forceinline__ unsigned units_before(const AttentionParams& p, const DecodeShape& shape,
                                                 const RowBlocks& blocks, std::int64_t sequence) {
  return shape.uniform ? static_cast<unsigned>(sequence) * blocks.units(p, shape)
                       : shape.starts[sequence];
}

// The walk through a thread block's units. All lanes of all warps do the same.
template <int kBlockM, int kBlockN>
class Units {
 public:
  __device__ __forceinline__ Units(const AttentionParams& p, const DecodeShape& shape)
      : p_(p), shape_(shape), lane_(threadIdx.x % 32) {
    unsigned total = 0;
    if (shape.uniform) {
      blocks_ = of(0);
      total = static_cast<unsigned>(p.batch_size) * units(blocks_);
    } else {
      for (int base = 0; base < sequences(); base += 32) total += scan(base, false);
    }
    const unsigned per = per_block(total, shape.num_blocks);
    unit_ = min(blockIdx.x * per, total);
    end_ = min(unit_ + per, total);
  }

  // Writes where every sequence begins, and where the last one ends.
  __device__ __forceinline__ void write_starts() const {
    if (threadIdx.x >= 32) return;
    unsigned before = 0;
    for (int base = 0; base < sequences(); base += 32) {
      const unsigned own = units_or_none(base + lane_), sum = inclusive_sum(own);
      if (base + lane_ < sequences()) shape_.starts[base + lane_] = before + sum - own;
      before += __shfl_sync(tile::kFullMask, sum, 31);
    }
    if (lane_ == 0) shape_.starts[sequences()] = before;
  }

  // The next segment, or none.
  __device__ __forceinline__ Segment next() {
    Segment segment{};
    segment.sequence = -1;
    if (unit_ >= end_) return segment;
    find();
    const unsigned within = unit_ - before_;
    const auto units = static_cast<unsigned>(blocks_.units_of_block(shape_));
    const unsigned row_block = within / units, unit = within - row_block * units;
    const unsigned head = row_block / static_cast<unsigned>(blocks_.of_head);
    segment.sequence = sequence_;
    segment.head_kv = static_cast<int>(head);
    segment.row_block = static_cast<int>(row_block) - segment.head_kv * blocks_.of_head;
    const unsigned count = is_split(shape_) ? 1 : min(units - unit, end_ - unit_);
    const int each = blocks_.unit_tiles(shape_);
    const int begin = blocks_.origin(shape_) + static_cast<int>(unit) * each;
    const int end = begin + static_cast<int>(count) * each;
    segment.tile = max(begin, blocks_.first_tile);
    segment.count = min(end, blocks_.end()) - segment.tile;
    // As part_of() tells: what a block does not begin, began before its own.
    const unsigned part = is_split(shape_) ? unit_ : 2 * blockIdx.x + (unit > 0 ? 0 : 1);
    segment.part = count == units ? -1 : static_cast<int>(part);
    unit_ += count;
    return segment;
  }

 private:
  __device__ __forceinline__ int sequences() const { return static_cast<int>(p_.batch_size); }
  __device__ __forceinline__ RowBlocks of(int sequence) const {
    return RowBlocks::of<kBlockM, kBlockN>(p_, shape_, sequence);
  }
  __device__ __forceinline__ unsigned units(const RowBlocks& blocks) const {
    return blocks.units(p_, shape_);
  }
  __device__ __forceinline__ unsigned units_or_none(int sequence) const {
    return sequence < sequences() ? units(of(sequence)) : 0;
  }
  __device__ __forceinline__ unsigned inclusive_sum(unsigned x) const {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned below = __shfl_up_sync(tile::kFullMask, x, step);
      if (lane_ >= step) x += below;
    }
    return x;
  }

  // The units of 32 sequences. `to_find`: moves to the one of them that has unit_, if one has, and
  // says so by ending the walk.
  __device__ __forceinline__ unsigned scan(int base, bool to_find) {
    const unsigned own = units_or_none(base + lane_), sum = inclusive_sum(own);
    if (to_find) {
      const unsigned has = __ballot_sync(tile::kFullMask, before_ + sum > unit_);
      if (has != 0) {
        const int first = __ffs(static_cast<int>(has)) - 1;
        sequence_ = base + first;
        before_ += __shfl_sync(tile::kFullMask, sum - own, first);
      }
    }
    return __shfl_sync(tile::kFullMask, sum, 31);
  }

  // Moves to the sequence that has unit_.
  __device__ __forceinline__ void find() {
    if (shape_.uniform) {
      sequence_ = static_cast<int>(unit_ / units(blocks_));
      before_ = static_cast<unsigned>(sequence_) * units(blocks_);
      return;
    }
    const int last = sequence_;
    if (last >= 0 && unit_ < before_ + units(blocks_)) return;
    // From the one behind on, if there was one.
    if (last >= 0) before_ += units(blocks_);
    for (int base = last + 1; sequence_ == last; base += 32) {
      const unsigned all = scan(base, true);
      if (sequence_ == last) before_ += all;
    }
    blocks_ = of(sequence_);
  }

  const AttentionParams& p_;
  const DecodeShape& shape_;
  const int lane_;
  unsigned unit_ = 0, end_ = 0;
  int sequence_ = -1;    // none yet
  unsigned before_ = 0;  // units of the sequences before
  RowBlocks blocks_{};   // of the sequence; of all if they are alike
};

}  // namespace dlattn::decode
