#pragma once

#include <cstdint>

#include "core/problem/positions.h"
#include "core/util/inline.h"
#include "cuda/tile/divider.h"
#include "dlattn/forward.h"

// The parameters of the kernels, plain C++: a launcher fills them, and the tests that run kernels
// on the CPU do.
namespace dlattn::backward_sm90 {

// The score modification beside softcap. Views without data: there is none.
struct ScoreMod {
  BasicTensorView<const float> alibi_slopes;  // [batch][heads]
  TensorView bias;                            // [batch][heads][queries][keys], in q's dtype
  BasicTensorView<const std::uint8_t> mask;
  MutableTensorView dbias;
  float to_log2;  // log2(e) where scores are natural, else 1

  DLATTN_SHARED bool has_tiles() const { return bias.data || mask.data; }
};

struct Problem {
  // As in AttentionParams.
  const std::int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_k;
  std::int64_t total_q, total_k, seqlen_q, seqlen_k;
  Causal causal;
  int head_dim, head_dim_v;

  // The order of work (work_place()): blocks of keys, or of dQ's queries, of all heads.
  Divider num_m_blocks;
  Divider num_heads;              // of a batch entry
  Divider heads_together;         // in a group, a block of each in turn
  std::uint32_t heads_in_groups;  // the heads of such groups
  Divider heads_left;             // the last group, if there is one

  unsigned num_blocks;  // there may be one more thread block

  int heads_per_kv_head;
  int heads_per_entry;  // of the batch: heads of q
  Window<int> window;
  float softmax_scale;
  float scale_log2;  // from q.k to scores in base 2, with softcap to tanh's argument
  float cap;         // softcap in the unit of lse: times log2(e), or not
  // Batch entries that a block walks, from its own on, with their own keys: more than one where
  // they share a bias whose gradient is wanted.
  int passes;
  // For the kernels that have it. With a bias or slopes scores are natural (has_natural_lse()),
  // and scale_log2, without softcap, is softmax_scale.
  ScoreMod score_mod;

  // In the workspace, all of whose heads have padded_rows queries (cuda/plan/backward_workspace.h).
  std::int64_t padded_rows;
  const float *lse_log2, *delta;
  // [batch][heads][blocks of keys][kConsumerWarps], zero at first; null: dalibi_slopes is not
  // wanted.
  float* slope_parts;
  float* dq_sum;                 // head_dim_tile numbers a row (traits.h); null: dq is not wanted
  MutableTensorView dq, dk, dv;  // null: not wanted

  // For sums of dQ in a fixed order (dq_semaphore.cuh), zero at first: a counter of thread blocks,
  // and one for each tile of queries; null: in any order.
  unsigned *tickets, *semaphores;

  // Where nobody clears the sum (dq_sender.cuh), zero at first: a counter for each tile of
  // 1 << dq_counter_shift queries; null: the sum is zero at first.
  unsigned* dq_counters;
  int dq_counter_shift;
};

}  // namespace dlattn::backward_sm90
