#pragma once

#include <cstdint>

#include "cuda/forward/wmma/split_params.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"

// The tile that a block of the split kernel works on, found in the fewest instructions.
namespace dlattn::wmma {

// tile::Sequence in chunks. Waits for the grids ahead where lengths are in memory.
struct SplitSequence {
  int seqlen_q;
  int seqlen_k;
  int shift;    // query i stands at key position i + shift
  int q, k, v;  // where its rows start

  __device__ __forceinline__ SplitSequence(const SplitParams& p, const tile::WorkTile& work) {
    const int head_kv = static_cast<int>(p.heads_per_kv_head.quotient(work.head));
    seqlen_q = p.seqlen_q;
    seqlen_k = p.seqlen_k;
    q = work.head * p.q_stride.head + work.batch * p.q_stride.batch;
    k = head_kv * p.k_stride.head + work.batch * p.k_stride.batch;
    v = head_kv * p.v_stride.head + work.batch * p.v_stride.batch;
    if (p.cu_seqlens_q) {
      ptx::wait_for_grids_ahead();
      const tile::SequenceRows queries = tile::query_rows(p, work.batch);
      const tile::SequenceRows keys = tile::key_rows(p, work.batch);
      seqlen_q = queries.count;
      seqlen_k = keys.count;
      q += queries.start * p.q_stride.row;
      k += keys.start * p.k_stride.row;
      v += keys.start * p.v_stride.row;
    }
    shift = position_shift(p.causal, seqlen_q, seqlen_k);
  }
};

// The address of a chunk of 16 bytes.
template <typename T>
__device__ __forceinline__ const T* chunk_at(const void* gmem, int offset) {
  return static_cast<const T*>(gmem) + static_cast<std::int64_t>(offset) * kChunkElements;
}

}  // namespace dlattn::wmma
