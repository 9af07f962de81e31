#pragma once

#include <cstdint>

#include "cuda/tile/scheduler.cuh"

namespace dlattn::tile {

// Where the results of one head of one sequence go. Apart from Sequence for kernels that work it
// out only when they have results: registers are scarce until then.
template <typename T>
struct OutputRows {
  int seqlen_q;
  T* out;
  float* lse;  // null: not wanted

  template <typename Params>  // AttentionParams, or what has the members of it that are needed
  __device__ __forceinline__ OutputRows(const Params& p, const Work& work) {
    seqlen_q = static_cast<int>(p.seqlen_q);
    std::int64_t out_start = work.batch * p.out_batch_stride;
    std::int64_t lse_start = work.batch * p.lse_batch_stride;
    if (p.cu_seqlens_q) {
      lse_start = p.cu_seqlens_q[work.batch];
      seqlen_q = static_cast<int>(p.cu_seqlens_q[work.batch + 1] - lse_start);
      out_start = lse_start * p.out_row_stride;
    }
    out = static_cast<T*>(p.out) + out_start + work.head * p.out_head_stride;
    lse = p.lse ? p.lse + lse_start + work.head * p.lse_head_stride : nullptr;
  }
};

// One head of one sequence: its lengths and where its rows start. Offsets are 64-bit: tensors may
// hold more than 2^31 elements.
template <typename T>
struct Sequence {
  int seqlen_q;
  int seqlen_k;
  int shift;  // query i stands at key position i + shift
  const T* q;
  const T* k;
  const T* v;

  __device__ __forceinline__ Sequence(const AttentionParams& p, const LaunchShape& shape,
                                      const Work& work) {
    const int head_kv = static_cast<int>(shape.heads_per_kv_head.quotient(work.head));
    seqlen_q = static_cast<int>(p.seqlen_q);
    seqlen_k = static_cast<int>(p.seqlen_k);
    q = static_cast<const T*>(p.q) + work.head * p.q_head_stride;
    k = static_cast<const T*>(p.k) + head_kv * p.k_head_stride;
    v = static_cast<const T*>(p.v) + head_kv * p.v_head_stride;
    if (p.cu_seqlens_q) {
      const int row_q = p.cu_seqlens_q[work.batch];
      const int row_k = p.cu_seqlens_k[work.batch];
      seqlen_q = p.cu_seqlens_q[work.batch + 1] - row_q;
      seqlen_k = p.cu_seqlens_k[work.batch + 1] - row_k;
      if (p.seqused_k) seqlen_k = min(seqlen_k, p.seqused_k[work.batch]);
      q += row_q * p.q_row_stride;
      k += row_k * p.k_row_stride;
      v += row_k * p.v_row_stride;
    } else {
      q += work.batch * p.q_batch_stride;
      k += work.batch * p.k_batch_stride;
      v += work.batch * p.v_batch_stride;
    }
    shift = p.causal == Causal::kTopLeft ? 0 : seqlen_k - seqlen_q;
  }
};

// Where the same head's results go; worked out at the end, to take no registers before.
template <typename T>
struct Result {
  T* out;
  float* lse;         // null: not wanted
  const float* sink;  // the head's; null: none

  __device__ __forceinline__ Result(const AttentionParams& p, const Work& work) {
    out = static_cast<T*>(p.out) + work.head * p.out_head_stride;
    lse = p.lse ? p.lse + work.head * p.lse_head_stride : nullptr;
    sink = p.sinks ? p.sinks + work.head * p.sinks_stride : nullptr;
    if (p.cu_seqlens_q) {
      const int row_q = p.cu_seqlens_q[work.batch];
      out += row_q * p.out_row_stride;
      if (lse) lse += row_q;
    } else {
      out += work.batch * p.out_batch_stride;
      if (lse) lse += work.batch * p.lse_batch_stride;
    }
  }
};

}  // namespace dlattn::tile
