#pragma once

#include <cstdint>

#include "core/util/ceil_div.h"
#include "core/util/inline.h"
#include "cuda/backward/sm90/params.h"
#include "cuda/backward/sm90/traits.h"
#include "cuda/plan/backward_workspace.h"
#include "cuda/plan/launch_shape.h"
#include "cuda/plan/tensor_box.h"

// Grids, their numbers and how tensors are described to TMA, as plain host code: for the plan, the
// launch, and the tests that run kernels on the CPU.
namespace dlattn::backward_sm90 {

inline std::int64_t num_row_blocks(std::int64_t rows, int block_rows) {
  return (rows + block_rows - 1) / block_rows;
}

// Rows of the sum of dQ in the workspace, and its bytes.
inline std::int64_t dq_sum_rows(const AttentionParams& p) {
  const std::int64_t entries = p.cu_seqlens_q ? 1 : p.batch_size;
  return entries * p.num_heads * padded_rows(p);
}
inline std::int64_t dq_sum_bytes(const AttentionParams& p, int head_dim_tile) {
  return dq_sum_rows(p) * head_dim_tile * 4;
}

// Whether blocks add to it in a fixed order (dq_semaphore.cuh), and the bytes of the counters for
// that, which lie behind it: the tickets', and one for each tile of queries.
inline bool adds_dq_in_order(const BackwardParams& b) {
  return b.deterministic && b.dq.data;
}
inline std::int64_t semaphore_bytes(const AttentionParams& p) {
  return (4 + dq_sum_rows(p) / kWarpgroupRows * 4 + 127) / 128 * 128;
}

// The counters behind it where the first block to come to a tile of queries stores its part
// (dq_sender.cuh): one for each tile.
inline std::int64_t dq_counter_bytes(const AttentionParams& p) {
  return (dq_sum_rows(p) / kWarpgroupRows * 4 + 127) / 128 * 128;
}

// Whether scores are modified beside softcap.
inline bool has_score_mod(const AttentionParams& p) {
  return p.bias.data || p.mask.data || p.alibi_slopes.data;
}
inline int smem_bytes(const AttentionParams& p, int head_dim_tile) {
  if (p.mask.data) return smem_with_mask(head_dim_tile, p.softcap != 0.0);
  return smem_map(head_dim_tile, p.softcap != 0.0).total;
}

// Whether dbias is dS as the kernel has it in shared memory, rounded and before softcap: of all
// queries, keys and heads, and of each entry of the batch or a sum over a pair of them. The launch
// of cuda/plan/dbias_launch.h computes others.
inline bool stores_dbias(const BackwardParams& b) {
  constexpr std::int64_t kMostEntries = 2;  // each rounds once
  const AttentionParams& p = b.forward;
  const MutableTensorView& x = b.dbias;
  if (!x.data || p.cu_seqlens_q || p.softcap != 0.0) return false;
  const auto is_summed = [](std::int64_t stride, std::int64_t size) {
    return stride == 0 && size > 1;
  };
  if (is_summed(x.row_stride, p.seqlen_q) || is_summed(x.col_stride, p.seqlen_k) ||
      is_summed(x.head_stride, p.num_heads))
    return false;
  if (is_summed(x.batch_stride, p.batch_size) && p.batch_size > kMostEntries) return false;
  // Rows are copied by 8 numbers.
  const std::uint64_t bits =
      reinterpret_cast<std::uintptr_t>(x.data) / 2 |
      static_cast<std::uint64_t>(p.seqlen_k | x.row_stride | x.head_stride | x.batch_stride);
  return x.col_stride == 1 && bits % 8 == 0;
}

// Batch entries that a block walks: all of them where they share a bias whose gradient it stores.
inline std::int64_t num_passes(const BackwardParams& b) {
  return stores_dbias(b) && b.dbias.batch_stride == 0 ? b.forward.batch_size : 1;
}

// Whether thread blocks form pairs (pair_kernel.cuh), and the keys of a block or a pair.
inline bool is_in_pairs(const BackwardParams& b, int head_dim_tile) {
  return is_wide(head_dim_tile) && b.forward.softcap == 0.0 && !has_score_mod(b.forward) &&
         !adds_dq_in_order(b);
}
inline int keys_of_work(const BackwardParams& b, int head_dim_tile) {
  return is_in_pairs(b, head_dim_tile) ? kPairKeys : block_n(head_dim_tile);
}

// Whether consumers compute dQ a step late (late_consumer.cuh): where blocks walk 96 tiles of
// queries in the mean. So it pays for what its start and its end cost, some two tiles' time.
inline bool is_late(const BackwardParams& b, int head_dim_tile) {
  constexpr std::int64_t kLeastTiles = 96;
  const AttentionParams& p = b.forward;
  if (is_wide(head_dim_tile) || p.softcap != 0.0 || has_score_mod(p) || adds_dq_in_order(b) ||
      p.cu_seqlens_q || p.window_left >= 0 || p.window_right >= 0)
    return false;
  const std::int64_t group = p.num_heads / greater<std::int64_t>(p.num_heads_kv, 1);
  const std::int64_t tiles = p.seqlen_q / block_m(head_dim_tile, false) * group;
  return (p.causal == Causal::kNone ? tiles : tiles / 2) >= kLeastTiles;
}

// Whether nobody clears the sum of dQ, as the first block to come to a tile stores its part.
inline bool stores_first_dq(const BackwardParams& b, int head_dim_tile) {
  return b.dq.data && !is_wide(head_dim_tile) && !has_score_mod(b.forward) &&
         !adds_dq_in_order(b) && !is_late(b, head_dim_tile);
}

inline std::int64_t num_key_blocks(const BackwardParams& b, int head_dim_tile) {
  const AttentionParams& p = b.forward;
  const std::int64_t blocks = num_row_blocks(p.seqlen_k, keys_of_work(b, head_dim_tile));
  return blocks * p.num_heads_kv * (p.batch_size / greater<std::int64_t>(num_passes(b), 1));
}
inline int block_m(const AttentionParams& p, int head_dim_tile) {
  return block_m(head_dim_tile, p.softcap != 0.0);
}
inline std::int64_t num_query_blocks(const AttentionParams& p, int head_dim_tile) {
  return num_row_blocks(p.seqlen_q, block_m(head_dim_tile, false)) * p.num_heads * p.batch_size;
}

// Walks the heads of all batch entries in groups of `together`, and some `left` at the end as one.
inline void walk_heads(Problem* problem, std::uint32_t together, std::uint32_t left) {
  const std::uint32_t heads = problem->num_blocks / problem->num_m_blocks.divisor();
  left = lesser(left, heads);
  left += (heads - left) % together;
  problem->heads_together = Divider(together);
  problem->heads_in_groups = heads - left;
  problem->heads_left = Divider(greater(left, 1u));
}

// Partial sums of dalibi_slopes: a head's from each warp of the consumers of each block of keys.
inline std::int64_t slope_parts_per_head(const BackwardParams& b, int head_dim_tile) {
  if (!b.dalibi_slopes.data) return 0;
  return num_row_blocks(b.forward.seqlen_k, block_n(head_dim_tile)) * kConsumerWarps;
}

inline BackwardWorkspace workspace_map(const BackwardParams& b, int head_dim_tile) {
  return backward_workspace(b, slope_parts_per_head(b, head_dim_tile));
}

// For a grid with a block for each `block_rows` of `rows`, of `heads` of each of `entries`.
inline Problem make_problem(const BackwardParams& b, int head_dim_tile, std::int64_t rows,
                            int block_rows, std::int64_t heads, std::int64_t entries) {
  const AttentionParams& p = b.forward;
  constexpr double kLog2e = 1.4426950408889634;
  const auto divider = [](std::int64_t n) {
    return Divider(static_cast<std::uint32_t>(greater<std::int64_t>(n, 1)));
  };
  Problem problem{};
  problem.cu_seqlens_q = p.cu_seqlens_q;
  problem.cu_seqlens_k = p.cu_seqlens_k;
  problem.seqused_k = p.seqused_k;
  problem.total_q = p.total_q;
  problem.total_k = p.total_k;
  problem.seqlen_q = p.seqlen_q;
  problem.seqlen_k = p.seqlen_k;
  problem.causal = p.causal;
  problem.head_dim = static_cast<int>(p.head_dim);
  problem.head_dim_v = static_cast<int>(p.head_dim_v);
  problem.num_m_blocks = divider(num_row_blocks(rows, block_rows));
  problem.num_heads = divider(heads);
  problem.num_blocks = static_cast<unsigned>(num_row_blocks(rows, block_rows) * heads * entries);
  walk_heads(&problem, 1, 0);
  problem.heads_per_kv_head =
      static_cast<int>(p.num_heads / greater<std::int64_t>(p.num_heads_kv, 1));
  problem.heads_per_entry = static_cast<int>(p.num_heads);
  problem.window = window_of<int>(p);
  problem.softmax_scale = static_cast<float>(p.softmax_scale);
  const double unit = has_natural_lse(p) ? 1.0 : kLog2e;  // of lse
  const bool capped = p.softcap != 0.0;
  problem.scale_log2 =
      static_cast<float>(capped ? p.softmax_scale / p.softcap : p.softmax_scale * unit);
  problem.cap = static_cast<float>(p.softcap * unit);
  problem.passes = 1;
  problem.score_mod = {p.alibi_slopes, p.bias, p.mask,
                       stores_dbias(b) ? b.dbias : MutableTensorView(),
                       has_natural_lse(p) ? static_cast<float>(kLog2e) : 1.0f};
  const BackwardWorkspace map = workspace_map(b, head_dim_tile);
  problem.padded_rows = padded_rows(p);
  problem.lse_log2 = workspace_at<const float>(b, map.lse);
  problem.delta = workspace_at<const float>(b, map.delta);
  problem.slope_parts = b.dalibi_slopes.data ? workspace_at<float>(b, map.slope_parts) : nullptr;
  problem.dq_sum = b.dq.data ? workspace_at<float>(b, map.own) : nullptr;
  if (stores_first_dq(b, head_dim_tile)) {
    problem.dq_counters = workspace_at<unsigned>(b, map.own + dq_sum_bytes(p, head_dim_tile));
    problem.dq_counter_shift = block_m(head_dim_tile, p.softcap != 0.0) == 128 ? 7 : 6;
  }
  problem.dq = b.dq;
  problem.dk = b.dk;
  problem.dv = b.dv;
  return problem;
}

inline Problem key_problem(const BackwardParams& b, int head_dim_tile) {
  const AttentionParams& p = b.forward;
  const std::int64_t passes = greater<std::int64_t>(num_passes(b), 1);
  Problem problem = make_problem(b, head_dim_tile, p.seqlen_k, keys_of_work(b, head_dim_tile),
                                 p.num_heads_kv, p.batch_size / passes);
  problem.passes = static_cast<int>(passes);
  const bool causal = p.causal != Causal::kNone;
  if (adds_dq_in_order(b)) {
    // A few heads together, so that blocks that start at a time seldom add to one head's tiles.
    // Under causality they do not: one head at a time, whose tiles of queries stay in L2.
    if (!causal) walk_heads(&problem, kHeadsTogether, 0);
    const std::int64_t counters =
        workspace_map(b, head_dim_tile).own + dq_sum_bytes(p, head_dim_tile);
    problem.tickets = workspace_at<unsigned>(b, counters);
    problem.semaphores = problem.tickets + 1;
  } else if (causal) {
    // One head at a time here too; but the last ones together, so that the grid ends with short
    // blocks.
    // One for each SM.
    const std::uint32_t kLastBlocks = is_in_pairs(b, head_dim_tile) ? 132 / kPairBlocks : 132;
    const std::int64_t last = core::ceil_div(kLastBlocks, problem.num_m_blocks.divisor());
    walk_heads(&problem, 1, static_cast<std::uint32_t>(last));
  }
  return problem;
}
inline Problem query_problem(const BackwardParams& b, int head_dim_tile) {
  const AttentionParams& p = b.forward;
  return make_problem(b, head_dim_tile, p.seqlen_q, block_m(head_dim_tile, false), p.num_heads,
                      p.batch_size);
}

struct TensorBoxes {
  cuda::TensorBox q, k, v, dout;
};

inline TensorBoxes tensor_boxes(const BackwardParams& b, int head_dim_tile) {
  const AttentionParams& p = b.forward;
  const int rows = block_m(p, head_dim_tile);
  const auto box = [&](const char* name, const TensorView& x, std::int64_t columns, bool of_keys) {
    const int box_rows = of_keys ? keys_of_work(b, head_dim_tile) : rows;
    const std::int64_t heads = of_keys ? p.num_heads_kv : p.num_heads;
    if (p.cu_seqlens_q)
      return cuda::varlen_box(name, x, columns, of_keys ? p.total_k : p.total_q, heads, box_rows);
    return cuda::tensor_box(name, x, columns, of_keys ? p.seqlen_k : p.seqlen_q, heads,
                            p.batch_size, box_rows);
  };
  return {box("q", p.q, p.head_dim, false), box("k", p.k, p.head_dim, true),
          box("v", p.v, p.head_dim_v, true), box("dout", b.dout, p.head_dim_v, false)};
}

}  // namespace dlattn::backward_sm90
