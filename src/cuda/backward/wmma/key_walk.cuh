#pragma once

#include "cuda/backward/wmma/sequence.cuh"
#include "cuda/backward/wmma/traits.h"
#include "cuda/plan/backward_workspace.h"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::backward_wmma {

// A number that is the same in all lanes, so that it takes one register of the warp's.
__device__ __forceinline__ int uniform(int x) {
  return __shfl_sync(tile::kFullMask, x, 0);
}

// Queries m * kBlockM and on of a query head, counted within its group.
struct QueryStep {
  int group_head;
  int m;
};

// The steps of a block of keys: the tiles of queries that see any of its keys, of one query head of
// the group after the other.
template <int kBlockM, int kWarps>
struct KeyWalk {
  const Shape& shape;
  int batch, head_kv;
  int block, num_blocks;  // of the head's keys
  int block_n;
  int n0;  // the block's first key
  SequenceOf seq;
  int begin, end;       // tiles of queries
  tile::Range visible;  // those of which every query sees all keys of the block
  int start;            // the one that each head begins with

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
    const tile::Mask mask(shape, seq.shift, seq.seqlen_k);
    const int last = min(n0 + block_n, seq.seqlen_k) - 1;
    const int first_query = max(mask.column(n0).begin, 0);
    const int end_query = min(mask.column(last).end, seq.seqlen_q);
    const bool none = last < n0 || end_query <= first_query;
    begin = none ? 0 : first_query / kBlockM;
    end = none ? 0 : (end_query + kBlockM - 1) / kBlockM;
    // A last tile of fewer queries counts as a whole one.
    const int see_all = n0 + block_n <= seq.seqlen_k ? mask.column(n0).end : 0;
    visible = {(max(mask.column(last).begin, 0) + kBlockM - 1) / kBlockM,
               see_all >= seq.seqlen_q ? end : max(see_all, 0) / kBlockM};
    // Blocks that add to dQ begin apart from each other, so that few add to the same rows at a
    // time. Under causality they do anyway.
    start = begin;
    if (shape.dq_sum && !shape.longest_first)
      start += static_cast<int>(std::int64_t{end - begin} * block / num_blocks);
    // Lengths that were loaded would have every lane keep all of these.
    for (int* x : {&batch, &head_kv, &block, &n0, &seq.entry, &seq.start_q, &seq.start_k,
                   &seq.seqlen_q, &seq.seqlen_k, &seq.rows_k, &seq.shift, &begin, &end,
                   &visible.begin, &visible.end, &start})
      *x = uniform(*x);
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
    return tile::contains(visible, step.m);
  }

  // The slots of a head's slope, one for each warp.
  __device__ __forceinline__ float* slope_part(int group_head) const {
    const std::int64_t num_heads = std::int64_t{shape.num_heads.divisor()} * group();
    const std::int64_t head = batch * num_heads + head_kv * group() + group_head;
    return shape.slope_parts + (head * num_blocks + block) * kWarps;
  }
  // By a block that has no steps.
  __device__ __forceinline__ void clear_slope_parts() const {
    if (!shape.slope_parts) return;
    for (int i = static_cast<int>(threadIdx.x); i < group() * kWarps; i += 32 * kWarps)
      slope_part(i / kWarps)[i % kWarps] = 0.0f;
  }
};

}  // namespace dlattn::backward_wmma
