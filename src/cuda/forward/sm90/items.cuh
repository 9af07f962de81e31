#pragma once

#include "cuda/forward/sm90/boxes.h"
#include "cuda/forward/sm90/setup.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"

// Which work items there are, and where their rows. The lengths of packed sequences are known on
// the device alone: there the producer finds the items, and hands them to the consumers with their
// Q.
namespace dlattn::sm90 {

// The items that this block computes: one of each round of as many as there are blocks. It has the
// same place in all rounds, which under causality is every so many lengths further; but where a
// window makes most items alike, and those of a head's first rows shorter, another one each time,
// as else these would be the same blocks'.
__device__ __forceinline__ unsigned item_of_round(const AttentionParams& params, unsigned round) {
  const unsigned first = round * gridDim.x;
  if (params.window_left < 0) return first + blockIdx.x;
  return first + (blockIdx.x + round * (gridDim.x - (gridDim.x + 7) / 8)) % gridDim.x;
}

// The lengths of a problem of one length.
__device__ __forceinline__ Item fixed_lengths(const AttentionParams& params) {
  return {0, 0, 0, 0, static_cast<int>(params.seqlen_q), static_cast<int>(params.seqlen_k)};
}
// Item `i` of one.
__device__ __forceinline__ Item fixed_item(const AttentionParams& params, const LaunchShape& shape,
                                           unsigned i) {
  const tile::Work work = tile::scheduled_work(params, shape, i);
  Item item = fixed_lengths(params);
  item.m_block = work.m_block, item.head = work.head, item.batch = work.batch;
  return item;
}

// The last of a pack's sequences whose items begin at or before `i`, or the first, by one thread:
// among eighths of the candidates at a time, whose bounds are on their way together. Where starts
// decrease it is any sequence.
__device__ __forceinline__ int find_sequence(const AttentionParams& params, int num_heads,
                                             int block_m, unsigned i) {
  constexpr int kParts = 8;
  int first = 0, count = static_cast<int>(params.batch_size);
#pragma unroll 1
  while (count > 1) {
    const int step = (count + kParts - 1) / kParts;
    int begun = 0;  // parts beside the first that begin at or before i
#pragma unroll
    for (int part = 1; part < kParts; ++part) {
      const int b = first + part * step;
      if (part * step >= count) continue;
      const int start = tile::packed_start(params.cu_seqlens_q, b, params.total_q);
      if (first_item(start, b, num_heads, block_m) <= i) ++begun;
    }
    first += begun * step;
    count = min(step, count - begun * step);
  }
  return first;
}

// Item `i` of a pack, and its sequence's first row of K and V. In the order of tile::scheduled_work
// within a sequence. There is none before the first sequence, after the last, or, in a sequence,
// after its own.
__device__ __forceinline__ Item packed_item(const AttentionParams& params, const LaunchShape& shape,
                                            int block_m, unsigned i, int* start_k) {
  const int num_heads = static_cast<int>(shape.num_heads.divisor());
  Item item{};
  item.batch = find_sequence(params, num_heads, block_m, i);
  const tile::PackedRows queries = tile::packed_queries(params, item.batch);
  const tile::PackedRows keys = tile::packed_keys(params, item.batch);
  item.start_q = queries.start;
  item.seqlen_k = keys.count;
  *start_k = keys.start;

  const int m_blocks = (queries.count + block_m - 1) / block_m;
  // Before the sequence's first item it wraps.
  const unsigned place = i - first_item(item.start_q, item.batch, num_heads, block_m);
  if (place >= static_cast<unsigned>(num_heads * m_blocks)) return item;
  int left = static_cast<int>(place);
  item.seqlen_q = queries.count;
  item.head = left / m_blocks;
  item.m_block = left % m_blocks;
  if (shape.longest_first) {
    constexpr int kTogether = static_cast<int>(tile::kHeadsTogether);
    const int first_head = item.head / kTogether * kTogether;
    const int heads = min(kTogether, num_heads - first_head);
    left -= first_head * m_blocks;
    item.head = first_head + left % heads;
    item.m_block = m_blocks - 1 - left / heads;
  }
  return item;
}

// Where a box's rows are, as the tensor maps count them (boxes.h).
struct BoxRows {
  int row, batch;
};

// From the sequence's row `first` on, as far as row `end`; `start`: the sequence's first row of a
// pack's.
template <bool kVarlen>
__device__ __forceinline__ BoxRows box_rows(const Item& item, int start, int end, int first) {
  if constexpr (!kVarlen) return {first, item.batch};
  return {static_cast<int>(tile::kPackEnd) - (end - first), start + end};
}

// Moves a box between the tensor and its place in shared memory.
template <bool kVarlen>
__device__ __forceinline__ void load_box(ptx::SmemAddress to, const ptx::TensorMap& map,
                                         ptx::SmemAddress mbarrier, int column, BoxRows rows,
                                         int head) {
  const ptx::BoxAt at = {column, rows.row, head, rows.batch};
  if constexpr (kVarlen) {
    ptx::tma_load(to, map, mbarrier, at, static_cast<int>(tile::kPackEnd));
  } else {
    ptx::tma_load(to, map, mbarrier, at);
  }
}
template <bool kVarlen>
__device__ __forceinline__ void store_box(const ptx::TensorMap& map, ptx::SmemAddress from,
                                          int column, BoxRows rows, int head) {
  const ptx::BoxAt at = {column, rows.row, head, rows.batch};
  if constexpr (kVarlen) {
    ptx::tma_store(map, from, at, static_cast<int>(tile::kPackEnd));
  } else {
    ptx::tma_store(map, from, at);
  }
}

}  // namespace dlattn::sm90
