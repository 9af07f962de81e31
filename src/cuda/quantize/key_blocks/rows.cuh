#pragma once

#include <cstdint>

#include "cuda/quantize/key_blocks/shape.h"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/vec.cuh"

// Where keys lie that are quantised, and how they are read.
namespace dlattn::quantize::key_blocks {

// One head of one sequence.
struct Head {
  int sequence;
  int head;
  int entry;  // of k, v and what becomes of them: the sequence, or 0 with variable length
  int start;  // its first row there
  int count;  // of keys in use

  __device__ __forceinline__ Head(const QuantizeParams& p, int sequence, int head)
      : sequence(sequence), head(head), entry(sequence), start(0) {
    count = static_cast<int>(p.seqlen_k);
    if (!p.cu_seqlens_k) return;
    const tile::SequenceRows rows = tile::key_rows(p, sequence);
    entry = 0, start = rows.start, count = rows.count;
  }

  // Offsets are 64-bit: tensors may hold more than 2^31 elements.
  template <typename T>
  __device__ __forceinline__ tile::RowSource<T> rows(const TensorView& x) const {
    return {static_cast<const T*>(x.data) + entry * x.batch_stride + start * x.row_stride +
                head * x.head_stride,
            x.row_stride};
  }
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

// Columns `first` and on of a row of `columns`; zeros beyond them.
template <bool kWhole, typename T>
__device__ __forceinline__ tile::Vec<T, kChunk> load_chunk(const T* row, int first, int columns) {
  tile::Vec<T, kChunk> chunk;
  if (kWhole && first < columns) return *reinterpret_cast<const tile::Vec<T, kChunk>*>(row + first);
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    const bool there = !kWhole && first + j < columns;
    chunk.x[j] = there ? row[first + j] : tile::from_float<T>(0.0f);
  }
  return chunk;
}

}  // namespace dlattn::quantize::key_blocks
