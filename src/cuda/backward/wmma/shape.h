#pragma once

#include <cstdint>

#include "core/problem/alignment.h"
#include "core/problem/positions.h"
#include "core/util/inline.h"
#include "cuda/backward/wmma/params.h"
#include "cuda/backward/wmma/traits.h"
#include "cuda/plan/backward_workspace.h"
#include "cuda/plan/launch_shape.h"
#include "dlattn/plan.h"

// Grids and their numbers, plain C++.
namespace dlattn::backward_wmma {

// Blocks of `rows` of `seqlen` queries or keys, for each of `heads`.
inline std::int64_t num_row_blocks(std::int64_t seqlen, int rows) {
  return (seqlen + rows - 1) / rows;
}

// The shape of a grid that has a block for each `rows` of `seqlen`, of `heads`.
inline Shape make_shape(const AttentionParams& p, std::int64_t seqlen, int rows, std::int64_t heads,
                        int store_bytes) {
  constexpr double kLog2e = 1.4426950408889634;
  const auto divider = [](std::int64_t n) {
    return Divider(static_cast<std::uint32_t>(greater<std::int64_t>(n, 1)));
  };
  Shape shape{};
  shape.num_m_blocks = divider(num_row_blocks(seqlen, rows));
  shape.num_heads = divider(heads);
  shape.longest_first = p.causal != Causal::kNone;
  const auto all_heads = static_cast<std::uint32_t>(heads * p.batch_size);
  const std::uint32_t left = all_heads % kHeadsTogether;
  shape.heads_in_groups = all_heads - left;
  shape.heads_left = divider(left);
  shape.heads_per_kv_head = divider(p.num_heads / greater<std::int64_t>(p.num_heads_kv, 1));
  shape.window = window_of<int>(p);
  shape.softmax_scale = static_cast<float>(p.softmax_scale);
  shape.softcap = static_cast<float>(p.softcap);
  shape.inverse_softcap = p.softcap != 0.0 ? static_cast<float>(1.0 / p.softcap) : 0.0f;
  shape.natural = p.softcap != 0.0 || p.alibi_slopes.data || p.bias.data;
  shape.score_log2 = static_cast<float>((shape.natural ? 1.0 : p.softmax_scale) * kLog2e);
  shape.natural_lse = has_natural_lse(p);
  shape.store_bytes = store_bytes;
  return shape;
}

// Thread blocks of a launch.
inline std::int64_t num_blocks(const BackwardParams& b, Kernel kernel, int head_dim_tile) {
  const AttentionParams& p = b.forward;
  switch (kernel) {
    case kKeys:
    case kLarge:
      return num_row_blocks(p.seqlen_k, key_tile(head_dim_tile).block_n) * p.num_heads_kv *
             p.batch_size;
    case kQueries:
      return b.dq.data ? num_row_blocks(p.seqlen_q, query_tile(head_dim_tile).block_m) *
                             p.num_heads * p.batch_size
                       : 0;
    case kConvert:
      return num_row_blocks(p.seqlen_q, kNumWarps * kPartRows) * p.num_heads * p.batch_size;
    case kBias:
      break;
  }
  return bias_grid(b, head_dim_tile).count();
}

inline Shape make_shape(const BackwardParams& b, Kernel kernel, int head_dim_tile,
                        int store_bytes) {
  const AttentionParams& p = b.forward;
  const bool keys = kernel == kKeys || kernel == kLarge;
  const int rows = keys                 ? key_tile(head_dim_tile).block_n
                   : kernel == kConvert ? kNumWarps * kPartRows
                                        : query_tile(head_dim_tile).block_m;
  Shape shape = make_shape(p, keys ? p.seqlen_k : p.seqlen_q, rows,
                           keys ? p.num_heads_kv : p.num_heads, store_bytes);
  shape.num_blocks = static_cast<std::uint32_t>(num_blocks(b, kernel, head_dim_tile));
  if (kernel == kBias) shape.bias = bias_grid(b, head_dim_tile);
  return shape;
}

// Whether dQ is added up in global memory by the kernel of dK and dV: where both are wanted, and
// bits may depend on the order of blocks.
inline bool sums_dq(const BackwardParams& b) {
  return !b.deterministic && b.dq.data && (b.dk.data || b.dv.data);
}
// Numbers of the workspace, in floats.
inline std::int64_t dq_sum_size(const AttentionParams& p, int head_dim_tile) {
  const std::int64_t entries = p.cu_seqlens_q ? 1 : p.batch_size;
  return entries * p.num_heads * parts_per_head(p) * (head_dim_tile / kPartColumns) * kPartSize;
}
inline std::int64_t slope_parts_per_head(const AttentionParams& p, int head_dim_tile) {
  return num_row_blocks(p.seqlen_k, key_tile(head_dim_tile).block_n) *
         key_tile(head_dim_tile).num_warps;
}

// The widest stores to dq, dk and dv: 16 bytes, or of single numbers.
inline int store_bytes(const BackwardParams& b) {
  const AttentionParams& p = b.forward;
  const auto is_aligned = [](const MutableTensorView& x, const core::TensorSizes& sizes) {
    return !x.data || core::row_alignment(x, sizes, kElementBytes) == 16;
  };
  const core::TensorSizes keys = core::key_sizes(p);
  const bool all =
      is_aligned(b.dq, core::query_sizes(p)) && is_aligned(b.dk, keys) && is_aligned(b.dv, keys);
  return all ? 16 : kElementBytes;
}

// The arguments of a planned launch.
inline Shape planned_shape(const BackwardParams& b, const Plan& plan, Kernel kernel,
                           int head_dim_tile) {
  Shape shape = make_shape(b, kernel, head_dim_tile, store_bytes(b));
  const BackwardWorkspace map = backward_workspace(b, plan.parts_per_head);
  shape.lse = workspace_at<float>(b, map.lse);
  shape.delta = workspace_at<float>(b, map.delta);
  shape.delta_rows = padded_rows(b.forward);
  if (plan.cleared_bytes > 0)
    shape.dq_sum = workspace_at<float>(b, plan.workspace_bytes - plan.cleared_bytes);
  if (plan.parts_per_head > 0) shape.slope_parts = workspace_at<float>(b, map.slope_parts);
  return shape;
}

}  // namespace dlattn::backward_wmma
