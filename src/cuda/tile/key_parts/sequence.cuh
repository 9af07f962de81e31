#pragma once

#include "cuda/tile/key_parts/shape.h"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/seqlen.cuh"

// The lengths of a sequence, and which keys its rows see. Rows are those of all query heads of a KV
// head: row r is query r / packed_heads of the (r mod packed_heads)-th of them.
namespace dlattn::tile::key_parts {

using KeyMask = tile::PaddedMask<tile::PackedMask>;

struct Lengths {
  int seqlen_q;
  int seqlen_k;
  int first_key;  // leftpad_k

  __device__ __forceinline__ Lengths(const AttentionParams& p, int sequence) {
    seqlen_q = static_cast<int>(p.seqlen_q);
    seqlen_k = static_cast<int>(p.seqlen_k);
    if (p.cu_seqlens_q) seqlen_q = tile::query_rows(p, sequence).count;
    if (p.cu_seqlens_k) {
      seqlen_k = tile::key_rows(p, sequence).count;
    } else if (p.seqused_k) {
      seqlen_k = min(max(p.seqused_k[sequence], 0), seqlen_k);
    }
    first_key = p.leftpad_k ? min(max(p.leftpad_k[sequence], 0), seqlen_k) : 0;
  }

  __device__ __forceinline__ KeyMask mask(const AttentionParams& p,
                                          const LaunchShape& shape) const {
    return KeyMask(shape, position_shift(p.causal, seqlen_q, seqlen_k), seqlen_k, first_key);
  }
  __device__ __forceinline__ int rows(const LaunchShape& shape) const {
    return seqlen_q * static_cast<int>(shape.packed_heads.divisor());
  }
};

// Where a row of the KV head's rows of Q lies.
template <typename Q>
__device__ __forceinline__ const Q* query_row(const AttentionParams& p, const DecodeShape& shape,
                                              int sequence, int head_kv, const KeyMask& mask,
                                              int row) {
  const int heads = static_cast<int>(shape.packed_heads.divisor()), query = mask.query(row);
  const int head = head_kv * heads + row - query * heads;
  const Q* const q = static_cast<const Q*>(p.q.data) + head * p.q.head_stride;
  if (!p.cu_seqlens_q) return q + sequence * p.q.batch_stride + query * p.q.row_stride;
  return q + (tile::query_rows(p, sequence).start + query) * p.q.row_stride;
}

}  // namespace dlattn::tile::key_parts
