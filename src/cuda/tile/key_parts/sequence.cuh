#pragma once

#include "cuda/ptx/fence.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/tile/key_parts/shape.h"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/warp.cuh"

// The lengths of a sequence, and which keys its rows see. Rows are those of all query heads of a KV
// head: row r is query r / packed_heads of the (r mod packed_heads)-th of them.
namespace dlattn::tile::key_parts {

using KeyMask = tile::PaddedMask<tile::PackedMask>;

struct Lengths {
  int seqlen_q;
  int seqlen_k;
  int first_key;  // leftpad_k

  __device__ __forceinline__ Lengths(int seqlen_q, int seqlen_k, int first_key)
      : seqlen_q(seqlen_q), seqlen_k(seqlen_k), first_key(first_key) {}
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

// The lists of lengths of up to 32 sequences, a lane for each entry, as they are read before the
// wait for the grid ahead, which may be writing them: a guess, until it is confirmed behind the
// wait.
struct ListsOfLane {
  int used = 0, start = 0;

  __device__ __forceinline__ static bool serves(const AttentionParams& p,
                                                const DecodeShape& shape) {
    const std::int64_t entries = p.batch_size + (p.cu_seqlens_q ? 1 : 0);
    return ptx::kStartsEarly && !shape.uniform && entries <= 32 && !p.cu_seqlens_k &&
           !p.leftpad_k && !p.cache_batch_idx;
  }
  __device__ __forceinline__ static ListsOfLane read(const AttentionParams& p) {
    const int lane = static_cast<int>(threadIdx.x) % 32, last = static_cast<int>(p.batch_size);
    ListsOfLane lists;
    if (p.seqused_k) lists.used = ptx::load_relaxed(p.seqused_k + min(lane, last - 1));
    if (p.cu_seqlens_q) lists.start = ptx::load_relaxed(p.cu_seqlens_q + min(lane, last));
    return lists;
  }
  // Whether what has been read since is the same, of all lanes.
  __device__ __forceinline__ bool is(const ListsOfLane& other) const {
    return __all_sync(tile::kFullMask, used == other.used && start == other.start);
  }
  // The lengths of the lane's sequence, of the last one in lanes behind it: all lanes walk through
  // an only sequence with what they have of it.
  __device__ __forceinline__ Lengths lengths(const AttentionParams& p) const {
    int seqlen_q = static_cast<int>(p.seqlen_q), seqlen_k = static_cast<int>(p.seqlen_k);
    if (p.cu_seqlens_q) {
      const int sequence =
          min(static_cast<int>(threadIdx.x) % 32, static_cast<int>(p.batch_size) - 1);
      const int row = min(max(start, 0), static_cast<int>(p.total_q));
      const int begin = __shfl_sync(tile::kFullMask, row, sequence);
      const int end = __shfl_sync(tile::kFullMask, row, sequence + 1);
      seqlen_q = min(max(end - begin, 0), seqlen_q);
    }
    if (p.seqused_k) seqlen_k = min(max(used, 0), seqlen_k);
    return {seqlen_q, seqlen_k, 0};
  }
  // Those of any one.
  __device__ __forceinline__ Lengths of_sequence(const AttentionParams& p, int sequence) const {
    const Lengths own = lengths(p);
    return {__shfl_sync(tile::kFullMask, own.seqlen_q, sequence),
            __shfl_sync(tile::kFullMask, own.seqlen_k, sequence), 0};
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
