#pragma once

#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"

// Work tiles of sequences whose lengths are on the device alone: which sequence a tile is of is
// searched for, so that there are next to no tiles without rows.
namespace dlattn::tile {

// A work tile and the rows of its sequence.
struct SequenceTile : WorkTile {
  int start_q;             // the sequence's first row in q and out; 0 with fixed lengths
  int seqlen_q, seqlen_k;  // 0 queries: there is no such tile
};

// The lengths of a problem of fixed lengths, and tile `work` of one.
__device__ __forceinline__ SequenceTile fixed_lengths(const AttentionParams& params,
                                                      const WorkTile& work = {0, 0, 0}) {
  return {work, 0, static_cast<int>(params.seqlen_q), static_cast<int>(params.seqlen_k)};
}

// The last sequence whose tiles begin at or before `index`, or the first, by one thread: among
// eighths of the candidates at a time, whose bounds are on their way together. Where starts
// decrease it is any sequence.
__device__ __forceinline__ int find_sequence(const AttentionParams& params, int num_heads,
                                             int block_m, unsigned index) {
  constexpr int kParts = 8;
  int first = 0, count = static_cast<int>(params.batch_size);
#pragma unroll 1
  while (count > 1) {
    const int step = (count + kParts - 1) / kParts;
    int begun = 0;  // parts beside the first that begin at or before the tile
#pragma unroll
    for (int part = 1; part < kParts; ++part) {
      const int b = first + part * step;
      if (part * step >= count) continue;
      const int start = sequence_start(params.cu_seqlens_q, b, params.total_q);
      if (first_tile(start, b, num_heads, block_m) <= index) ++begun;
    }
    first += begun * step;
    count = min(step, count - begun * step);
  }
  return first;
}

// Tile `index`, and its sequence's first row of K and V. In the order of scheduled_tile within a
// sequence. There is none before the first sequence, after the last, or, in a sequence, after its
// own. kKeys: whether keys are of variable length too; else their number is left 0.
template <bool kKeys = true>
__device__ __forceinline__ SequenceTile varlen_tile(const AttentionParams& params,
                                                    const LaunchShape& shape, int block_m,
                                                    unsigned index, int* start_k) {
  const int num_heads = static_cast<int>(shape.num_heads.divisor());
  SequenceTile tile{};
  tile.batch = find_sequence(params, num_heads, block_m, index);
  const SequenceRows queries = query_rows(params, tile.batch);
  tile.start_q = queries.start;
  if constexpr (kKeys) {
    const SequenceRows keys = key_rows(params, tile.batch);
    tile.seqlen_k = keys.count;
    *start_k = keys.start;
  }

  const int m_blocks = (queries.count + block_m - 1) / block_m;
  // Before the sequence's first tile it wraps.
  const unsigned within = index - first_tile(tile.start_q, tile.batch, num_heads, block_m);
  if (within >= static_cast<unsigned>(num_heads * m_blocks)) return tile;
  int left = static_cast<int>(within);
  tile.seqlen_q = queries.count;
  tile.head = left / m_blocks;
  tile.m_block = left % m_blocks;
  if (shape.longest_first) {
    constexpr int kTogether = static_cast<int>(kHeadsTogether);
    const int first_head = tile.head / kTogether * kTogether;
    const int heads = min(kTogether, num_heads - first_head);
    left -= first_head * m_blocks;
    tile.head = first_head + left % heads;
    tile.m_block = m_blocks - 1 - left / heads;
  }
  return tile;
}

}  // namespace dlattn::tile
