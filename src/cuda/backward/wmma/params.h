#pragma once

#include <cstdint>

#include "core/problem/positions.h"
#include "core/util/inline.h"
#include "cuda/plan/bias_grid.h"
#include "cuda/tile/divider.h"
#include "dlattn/backward.h"

// The arguments of the kernels beside BackwardParams, plain C++.
namespace dlattn::backward_wmma {

// Numbers that the host computes once per launch. The first five are what tile::scheduled_tile
// takes; its row blocks are blocks of queries, or of keys.
struct Shape {
  Divider num_m_blocks;
  Divider num_heads;
  bool longest_first;
  std::uint32_t heads_in_groups;
  Divider heads_left;
  Divider heads_per_kv_head;
  Window<int> window;
  float softmax_scale;
  float softcap;  // 0: off
  float inverse_softcap;
  // From scores to base 2: softmax_scale * log2(e), or log2(e) where scores are modified beside the
  // scale, and so are natural.
  bool natural;
  float score_log2;
  bool natural_lse;  // has_natural_lse()
  int store_bytes;
  std::uint32_t num_blocks;  // a grid has one at least
  BiasGrid bias;             // of the kernel of dbias
  // In the workspace: lse and delta of all rows, `delta_rows` of each head
  // (cuda/plan/backward_workspace.h).
  const float* lse;
  const float* delta;
  std::int64_t delta_rows;
  // The sum of dQ (traits.h), or null: dQ is made elsewhere. A sequence's parts
  // begin at first_part().
  float* dq_sum;
  // Sums of -dS |position - key| by head of q, block of keys and warp; null: not wanted.
  float* slope_parts;
};

// The first part of dQ, of 16 queries, of a varlen sequence whose first row of q is `start`.
// Rounded, so that it takes no sum over the sequences before.
constexpr std::int64_t first_part(int start, int sequence) {
  return start / 16 + sequence;
}
// The parts of one head of a batch entry, or of all sequences.
DLATTN_SHARED std::int64_t parts_per_head(const AttentionParams& p) {
  return p.cu_seqlens_q ? p.total_q / 16 + p.batch_size : (p.seqlen_q + 15) / 16;
}

}  // namespace dlattn::backward_wmma
