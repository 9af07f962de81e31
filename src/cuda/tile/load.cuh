#pragma once

#include "cuda/tile/copy.cuh"
#include "cuda/tile/seqlen.cuh"

// Copies of a thread block from global to shared memory. Both functions start copies; see copy_rows
// for when they are complete.
namespace dlattn::tile {

// Rows m0 .. m0 + kBlockM - 1 of q; zeros past the sequence's end.
template <int kBlockM, int kHeadDim, int kLd, int kThreads, typename T, typename Sequence>
__device__ __forceinline__ void start_q_copy(T* sQ, const Sequence& seq,
                                             const AttentionParams& params,
                                             const LaunchShape& shape, int m0) {
  // seed: query-rows
  copy_rows<kBlockM, kHeadDim, kLd, kThreads>(sQ, seq.q + m0 * params.q.row_stride,
                                              params.q.row_stride, seq.seqlen_q - m0,
                                              static_cast<int>(params.head_dim), shape.copy_bytes);
}

// Keys n0 .. n0 + kBlockN - 1 of k and v, as one group with all that was started before; zeros from
// `end` on, the first key that no row of the block sees any more.
template <int kBlockN, int kHeadDim, int kLd, int kThreads, typename T>
__device__ __forceinline__ void start_kv_copy(T* sK, T* sV, const Sequence<T>& seq,
                                              const AttentionParams& params,
                                              const LaunchShape& shape, int n0, int end) {
  const KeySource<T>& keys = seq.keys;
  copy_rows<kBlockN, kHeadDim, kLd, kThreads>(sK, keys.k.row(n0), keys.k.stride, end - n0,
                                              static_cast<int>(params.head_dim), shape.copy_bytes);
  copy_rows<kBlockN, kHeadDim, kLd, kThreads>(sV, keys.v.row(n0), keys.v.stride, end - n0,
                                              static_cast<int>(params.head_dim_v),
                                              shape.copy_bytes);
  ptx::cp_async_commit();
}

}  // namespace dlattn::tile
