#pragma once

#include <cstdint>

#include "cuda/tile/scheduler.cuh"

namespace dlattn::tile {

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
  T* out;
  float* lse;  // null: not wanted

  __device__ __forceinline__ Sequence(const AttentionParams& p, const LaunchShape& shape,
                                      const Work& work) {
    seqlen_q = static_cast<int>(p.seqlen_q);
    seqlen_k = static_cast<int>(p.seqlen_k);
    std::int64_t q_start, k_start, v_start, out_start, lse_start;
    if (p.cu_seqlens_q) {
      const std::int64_t row_q = p.cu_seqlens_q[work.batch];
      const std::int64_t row_k = p.cu_seqlens_k[work.batch];
      seqlen_q = static_cast<int>(p.cu_seqlens_q[work.batch + 1] - row_q);
      seqlen_k = static_cast<int>(p.cu_seqlens_k[work.batch + 1] - row_k);
      if (p.seqused_k) seqlen_k = min(seqlen_k, p.seqused_k[work.batch]);
      q_start = row_q * p.q_row_stride;
      k_start = row_k * p.k_row_stride;
      v_start = row_k * p.v_row_stride;
      out_start = row_q * p.out_row_stride;
      lse_start = row_q;
    } else {
      q_start = work.batch * p.q_batch_stride;
      k_start = work.batch * p.k_batch_stride;
      v_start = work.batch * p.v_batch_stride;
      out_start = work.batch * p.out_batch_stride;
      lse_start = work.batch * p.lse_batch_stride;
    }
    const int head_kv = work.head / shape.heads_per_kv_head;
    shift = p.causal == Causal::kTopLeft ? 0 : seqlen_k - seqlen_q;
    q = static_cast<const T*>(p.q) + q_start + work.head * p.q_head_stride;
    k = static_cast<const T*>(p.k) + k_start + head_kv * p.k_head_stride;
    v = static_cast<const T*>(p.v) + v_start + head_kv * p.v_head_stride;
    out = static_cast<T*>(p.out) + out_start + work.head * p.out_head_stride;
    lse = p.lse ? p.lse + lse_start + work.head * p.lse_head_stride : nullptr;
  }
};

}  // namespace dlattn::tile
