#pragma once

#include "cuda/quantize/key_blocks/shape.h"
#include "cuda/tile/seqlen.cuh"

// The items of a thread block, in order: those of one head that follow each other, each a tensor of
// a block of keys, v before k. Blocks are numbered as scales are.
namespace dlattn::quantize::key_blocks {

// Where it is read and written. Offsets are 64-bit: tensors may hold more than 2^31 elements.
struct alignas(16) Item {
  const std::uint16_t* from;
  std::uint8_t* to;
  float* scale;
  int rows;  // from the block's first one on that are in use; 0: nothing is to be done
  int n;     // the block's first key
  // The sequence: which one, its first row in k and v, unless all have entries of their own, and
  // how many keys are in use.
  int sequence;
  int start;
  int count;
};

// The last sequence whose blocks begin at or before `index`, or the first. Where starts decrease it
// is any sequence.
__device__ __forceinline__ int sequence_of_block(const QuantizeParams& p, int block_n,
                                                 unsigned index) {
  int first = 0, end = static_cast<int>(p.batch_size);
#pragma unroll 1
  while (end - first > 1) {
    const int middle = first + (end - first) / 2;
    const int start = tile::sequence_start(p.cu_seqlens_k, middle, p.total_k);
    (first_block(start, middle, block_n) <= index ? first : end) = middle;
  }
  return first;
}

// That of a tensor of block `index` of a head. Reads lengths, which lie on the device.
__device__ __forceinline__ Item item_of_block(const QuantizeParams& p, const Shape& shape,
                                              int columns, int block_n, unsigned index, int head,
                                              bool of_k) {
  Item item{};
  unsigned block;
  std::int64_t entry = 0, first = 0;
  if (p.cu_seqlens_k) {
    item.sequence = sequence_of_block(p, block_n, index);
    const tile::SequenceRows rows = tile::key_rows(p, item.sequence);
    item.start = rows.start;
    item.count = rows.count;
    first = first_block(rows.start, item.sequence, block_n);
    block = index - static_cast<unsigned>(first);  // before the sequence's first one it wraps
  } else {
    const unsigned sequence = shape.blocks.quotient(index);
    item.sequence = static_cast<int>(sequence);
    item.count = static_cast<int>(p.seqlen_k);
    entry = item.sequence;
    block = index - sequence * shape.blocks.divisor();
  }
  if (block >= static_cast<unsigned>((item.count + block_n - 1) / block_n)) {
    item.n = block == 0 ? 0 : -1;
    return item;
  }
  item.n = static_cast<int>(block) * block_n;
  item.rows = item.count - item.n;
  const TensorView& x = of_k ? p.k : p.v;
  const QuantizedView& view = shape.to;
  item.from = static_cast<const std::uint16_t*>(x.data) + entry * x.batch_stride +
              (std::int64_t{item.start} + item.n) * x.row_stride + head * x.head_stride;
  item.to = const_cast<std::uint8_t*>(of_k ? view.k : view.v) +
            (entry * view.batch_stride + head * view.head_stride +
             (std::int64_t{item.start} + item.n) * columns) *
                (of_k ? 1 : value_bytes(p.precision));
  item.scale = const_cast<float*>(of_k ? view.k_scale : view.v_scale) +
               entry * view.scale_batch_stride + head * view.scale_head_stride + first + block;
  return item;
}

}  // namespace dlattn::quantize::key_blocks
