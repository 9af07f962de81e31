#pragma once

#include <cstdint>

#include "cuda/backward/wmma/params.h"
#include "cuda/backward/wmma/traits.h"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::backward_wmma {

// The rows of one sequence in all tensors of a call.
struct SequenceOf {
  int entry;  // of the batch; 0 with variable length
  int start_q, start_k;
  int seqlen_q;
  int seqlen_k;  // keys in use
  int rows_k;    // keys that it has rows for
  int shift;     // query i stands at key position i + shift

  __device__ __forceinline__ SequenceOf(const AttentionParams& p, int batch)
      : entry(batch),
        start_q(0),
        start_k(0),
        seqlen_q(static_cast<int>(p.seqlen_q)),
        seqlen_k(static_cast<int>(p.seqlen_k)),
        rows_k(seqlen_k) {
    if (p.cu_seqlens_q) {
      const tile::SequenceRows queries = tile::query_rows(p, batch);
      const tile::SequenceRows keys = tile::key_rows(p, batch);
      entry = 0;
      start_q = queries.start, seqlen_q = queries.count;
      start_k = keys.start, seqlen_k = keys.count;
      rows_k = tile::sequence_rows(p.cu_seqlens_k, batch, p.total_k, p.seqlen_k).count;
    }
    shift = position_shift(p.causal, seqlen_q, seqlen_k);
  }

  // Row 0 of a head of a tensor.
  template <typename T, typename View>
  __device__ __forceinline__ T* rows(const View& x, int start, int head) const {
    return static_cast<T*>(x.data) + entry * x.batch_stride + start * x.row_stride +
           head * x.head_stride;
  }
};

// Where the parts of dQ of 16 queries of a head begin, `column_parts` of them.
__device__ __forceinline__ float* dq_part(const BackwardParams& b, const Shape& shape,
                                          const SequenceOf& seq, int batch, int head, int part,
                                          int column_parts) {
  const AttentionParams& p = b.forward;
  const std::int64_t first = p.cu_seqlens_q ? first_part(seq.start_q, batch) : 0;
  const std::int64_t before = (seq.entry * p.num_heads + head) * parts_per_head(p);
  return shape.dq_sum + (before + first + part) * column_parts * kPartSize;
}

}  // namespace dlattn::backward_wmma
