#pragma once

#include "cuda/backward/wmma/sequence.cuh"
#include "cuda/backward/wmma/traits.h"
#include "cuda/plan/backward_workspace.h"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/scheduler.cuh"

namespace dlattn::backward_wmma {

// Queries m * kBlockM and on of a query head, counted within its group.
struct QueryStep {
  int group_head;
  int m;
};

// The steps of a block of keys: the tiles of queries that see any of its keys, of one query head of
// the group after the other.
template <int kBlockM>
struct KeyWalk {
  const Shape& shape;
  int batch, head_kv;
  int block, num_blocks;  // of the head's keys
  int block_n;
  int n0;  // the block's first key
  SequenceOf seq;
  int begin, end;          // tiles of queries
  int start;               // the one that each head begins with
  std::int64_t first_row;  // of head 0 in lse and delta

  __device__ __forceinline__ KeyWalk(const AttentionParams& p, const Shape& shape,
                                     const tile::WorkTile& work, int block_n)
      : shape(shape),
        batch(work.batch),
        head_kv(work.head),
        num_blocks(static_cast<int>(shape.num_m_blocks.divisor())),
        block_n(block_n),
        seq(p, work.batch) {
    // Under causality the first keys are seen by most queries.
    block = shape.longest_first ? num_blocks - 1 - work.m_block : work.m_block;
    n0 = block * block_n;
    first_row = padded_row_index(p, work.batch, 0, seq.start_q);
    const tile::Mask mask(shape, seq.shift, seq.seqlen_k);
    const int last = min(n0 + block_n, seq.seqlen_k) - 1;
    const int first_query = max(mask.column(n0).begin, 0);
    const int end_query = min(mask.column(last).end, seq.seqlen_q);
    const bool none = last < n0 || end_query <= first_query;
    begin = none ? 0 : first_query / kBlockM;
    end = none ? 0 : (end_query + kBlockM - 1) / kBlockM;
    // Blocks that add to dQ begin apart from each other, so that few add to the same rows at a
    // time. Under causality they do anyway.
    start = begin;
    if (shape.dq_sum && !shape.longest_first)
      start += static_cast<int>(std::int64_t{end - begin} * block / num_blocks);
  }

  __device__ __forceinline__ int group() const {
    return static_cast<int>(shape.heads_per_kv_head.divisor());
  }
  __device__ __forceinline__ bool any() const { return begin < end; }
  __device__ __forceinline__ QueryStep first() const { return {0, start}; }
  __device__ __forceinline__ QueryStep next(const QueryStep& step) const {
    const int m = step.m + 1 < end ? step.m + 1 : begin;
    return {step.group_head + (m == start ? 1 : 0), m};
  }
  __device__ __forceinline__ bool exists(const QueryStep& step) const {
    return step.group_head < group();
  }
  __device__ __forceinline__ int head(const QueryStep& step) const {
    return head_kv * group() + step.group_head;
  }
  // Whether all queries of a step that exist see all keys of the block by position.
  __device__ __forceinline__ bool all_visible(const QueryStep& step) const {
    const int m0 = step.m * kBlockM;
    const tile::Mask mask(shape, seq.shift, seq.seqlen_k);
    return tile::contains_all(mask.every_row(m0, min(m0 + kBlockM, seq.seqlen_q) - 1), n0, block_n);
  }

  // The slots of a head's slope, one for each pair of warps.
  __device__ __forceinline__ float* slope_part(int group_head) const {
    const std::int64_t num_heads = std::int64_t{shape.num_heads.divisor()} * group();
    const std::int64_t head = batch * num_heads + head_kv * group() + group_head;
    return shape.slope_parts + (head * num_blocks + block) * kPairs;
  }
  // By a block that has no steps.
  __device__ __forceinline__ void clear_slope_parts() const {
    if (!shape.slope_parts) return;
    for (int i = static_cast<int>(threadIdx.x); i < group() * kPairs; i += kNumThreads)
      slope_part(i / kPairs)[i % kPairs] = 0.0f;
  }
};

}  // namespace dlattn::backward_wmma
