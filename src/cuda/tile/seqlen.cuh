#pragma once

#include <cstdint>

#include "core/problem/positions.h"
#include "cuda/tile/key_source.cuh"
#include "cuda/tile/scheduler.cuh"

namespace dlattn::tile {

// The rows of a varlen sequence in its tensor.
struct SequenceRows {
  int start;
  int count;
};

// Where a sequence begins, in the tensor of `total` rows. cu_seqlens lie on the device, so nobody
// has checked them: starts may decrease, be negative or beyond the tensor.
__device__ __forceinline__ int sequence_start(const std::int32_t* cu_seqlens, int sequence,
                                              std::int64_t total) {
  return min(max(cu_seqlens[sequence], 0), static_cast<int>(total));
}

// Its rows: those up to the next one's start that the tensor has, at most `longest`. Sequences
// overlap where starts decrease; none leaves the tensor, or what is as large as the longest one.
__device__ __forceinline__ SequenceRows sequence_rows(const std::int32_t* cu_seqlens, int sequence,
                                                      std::int64_t total, std::int64_t longest) {
  const int start = sequence_start(cu_seqlens, sequence, total);
  const int end = sequence_start(cu_seqlens, sequence + 1, total);
  return {start, min(max(end - start, 0), static_cast<int>(longest))};
}

// Sequence `sequence` of a problem's q, and of its k and v the keys that are in use. `Params`:
// AttentionParams, or what has the members of it that are needed.
template <typename Params>
__device__ __forceinline__ SequenceRows query_rows(const Params& p, int sequence) {
  return sequence_rows(p.cu_seqlens_q, sequence, p.total_q, p.seqlen_q);
}
template <typename Params>
__device__ __forceinline__ SequenceRows key_rows(const Params& p, int sequence) {
  SequenceRows keys = sequence_rows(p.cu_seqlens_k, sequence, p.total_k, p.seqlen_k);
  if (p.seqused_k) keys.count = min(max(p.seqused_k[sequence], 0), keys.count);
  return keys;
}

// One head of one sequence: its lengths, where its rows of q start, where its keys lie. Offsets are
// 64-bit: tensors may hold more than 2^31 elements.
template <typename T>
struct Sequence {
  int seqlen_q;
  int seqlen_k;
  int shift;  // query i stands at key position i + shift
  const T* q;
  KeySource<T> keys;

  __device__ __forceinline__ Sequence(const AttentionParams& p, const LaunchShape& shape,
                                      const WorkTile& work)
      : keys(p, static_cast<int>(shape.heads_per_kv_head.quotient(work.head))) {
    seqlen_q = static_cast<int>(p.seqlen_q);
    seqlen_k = static_cast<int>(p.seqlen_k);
    q = static_cast<const T*>(p.q.data) + work.head * p.q.head_stride;
    if (p.cu_seqlens_q) {
      const SequenceRows queries = query_rows(p, work.batch);
      const SequenceRows rows_k = key_rows(p, work.batch);
      seqlen_q = queries.count;
      seqlen_k = rows_k.count;
      q += queries.start * p.q.row_stride;
      keys.begin_at_row(rows_k.start);
    } else {
      q += work.batch * p.q.batch_stride;
      keys.begin_at_batch(p, work.batch);
    }
    shift = position_shift(p.causal, seqlen_q, seqlen_k);
  }
};

// Where the results of one head of one sequence go. Apart from Sequence, so that kernels work it
// out when they have results: registers are scarce until then.
template <typename T>
struct ResultRows {
  int seqlen_q;
  T* out;
  float* lse;         // null: not wanted
  const float* sink;  // the head's; null: none

  template <typename Params>  // AttentionParams, or what has the members of it that are needed
  __device__ __forceinline__ ResultRows(const Params& p, const WorkTile& work) {
    seqlen_q = static_cast<int>(p.seqlen_q);
    out = static_cast<T*>(p.out.data) + work.head * p.out.head_stride;
    lse = p.lse.data ? p.lse.data + work.head * p.lse.head_stride : nullptr;
    sink = p.sinks.data ? p.sinks.data + work.head * p.sinks.head_stride : nullptr;
    if (p.cu_seqlens_q) {
      const SequenceRows queries = query_rows(p, work.batch);
      seqlen_q = queries.count;
      out += queries.start * p.out.row_stride;
      if (lse) lse += queries.start;
    } else {
      out += work.batch * p.out.batch_stride;
      if (lse) lse += work.batch * p.lse.batch_stride;
    }
  }
};

}  // namespace dlattn::tile
