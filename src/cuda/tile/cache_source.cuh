#pragma once

#include <cstdint>
#include <limits>

#include "cuda/tile/seqlen.cuh"
#include "dlattn/forward.h"

// The keys of a sequence in a cache: how many there are, and where each of them lies. Lengths,
// entries and pages stand on the device, so nobody has checked them: each is clamped to what there
// is.
namespace dlattn::tile {

// The row of a cache's tensors that a key has: a row of an entry, or of a page of the pool.
struct CacheRow {
  int index;
  int row;

  // Its first element of head 0. Offsets are 64-bit.
  __device__ __forceinline__ std::int64_t offset(const TensorView& x) const {
    return index * x.batch_stride + row * x.row_stride;
  }
};

struct CacheSource {
  const std::int32_t* pages;  // the sequence's; null: its keys are side by side
  unsigned page_size;
  int last;   // the last page of the pool
  int entry;  // of the cache; unused with pages

  __device__ __forceinline__ CacheSource(const AttentionParams& p, int sequence)
      : pages(p.page_table.data ? p.page_table.data + sequence * p.page_table.batch_stride
                                : nullptr),
        page_size(static_cast<unsigned>(min(p.page_size, std::int64_t{kMost}))),
        last(static_cast<int>(min(p.num_pages, std::int64_t{kMost}) - 1)),
        entry(sequence) {
    const int last_entry = static_cast<int>(min(p.cache_batch_size, std::int64_t{kMost}) - 1);
    if (p.cache_batch_idx) entry = min(max(p.cache_batch_idx[sequence], 0), max(last_entry, 0));
  }

  // Key n, which a query sees by position: nothing is read of the table for other keys.
  __device__ __forceinline__ CacheRow find(int n) const {
    if (!pages) return {entry, n};
    const unsigned at = static_cast<unsigned>(n) / page_size;
    return {min(max(pages[at], 0), last), static_cast<int>(static_cast<unsigned>(n) % page_size)};
  }

 private:
  static constexpr int kMost = std::numeric_limits<int>::max();
};

// A head of a sequence whose keys lie in a cache: the members of Sequence, but for its keys.
template <typename T>
struct CachedSequence {
  int seqlen_q;
  int seqlen_k;
  int shift;      // query i stands at key position i + shift
  int first_key;  // leftpad_k: nobody sees the keys before
  const T* q;

  __device__ __forceinline__ CachedSequence(const AttentionParams& p, const LaunchShape&,
                                            const WorkTile& work) {
    seqlen_q = static_cast<int>(p.seqlen_q);
    seqlen_k = static_cast<int>(p.seqlen_k);
    if (p.seqused_k) seqlen_k = min(max(p.seqused_k[work.batch], 0), seqlen_k);
    first_key = p.leftpad_k ? min(max(p.leftpad_k[work.batch], 0), seqlen_k) : 0;
    q = static_cast<const T*>(p.q.data) + work.head * p.q.head_stride;
    if (p.cu_seqlens_q) {
      const SequenceRows queries = query_rows(p, work.batch);
      seqlen_q = queries.count;
      q += queries.start * p.q.row_stride;
    } else {
      q += work.batch * p.q.batch_stride;
    }
    shift = position_shift(p.causal, seqlen_q, seqlen_k);
  }
};

}  // namespace dlattn::tile
