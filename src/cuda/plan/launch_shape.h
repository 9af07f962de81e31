#pragma once

#include <cstdint>

#include "core/problem/alignment.h"
#include "core/problem/positions.h"
#include "core/util/inline.h"
#include "cuda/tile/divider.h"
#include "dlattn/forward.h"

// Numbers that the host computes once per launch, so that thread blocks do not: plain C++, shared
// by the launchers and by the tests that run kernels on the CPU.
namespace dlattn {

// Heads that are walked together, longest first (scheduler.cuh), but for plans that say all.
constexpr unsigned kHeadsTogether = 8;

struct LaunchShape {
  Divider num_m_blocks;       // per head
  Divider num_heads;          // of q, packed ones as one
  Divider heads_per_kv_head;  // query heads that share a head of k and v
  // Bytes per access, by alignment (core/problem/alignment.h): of global-to-shared copies, of
  // stores to out, of loads of bias and mask.
  int copy_bytes, store_bytes, bias_load_bytes, mask_load_bytes;
  Window<int> window;  // the keys that a row may see around its position
  float scale_log2;    // softmax_scale * log2(e): softmax works in base 2
  float softmax_scale;
  float softcap;  // 0: off
  float inverse_softcap;
  bool natural;  // scores are modified beside the scale, so they are natural until the softmax
  bool longest_first;  // walk row blocks from last to first: under causality the last ones see most
                       // keys
  std::uint32_t heads_in_groups;  // of all batch entries, those in full groups of kHeadsTogether
  Divider heads_left;             // that are not: walked together too, behind those
  Divider packed_heads;           // query heads whose rows tiles hold in turn (tile/rows.cuh)
};

// Where the work tiles of a varlen sequence begin whose first row of q is `start`. Rounded, so that
// it takes no sum over the sequences before: of the tiles up to the next one's up to num_heads are
// none.
constexpr unsigned first_tile(int start, int sequence, int num_heads, int block_m) {
  return static_cast<unsigned>(start / block_m + sequence) * static_cast<unsigned>(num_heads);
}

// Work tiles of a problem; with varlen at most. There are none without sequences, or without a row
// that one could have.
inline std::int64_t num_tiles(const AttentionParams& p, int block_m) {
  if (p.batch_size == 0 || (p.cu_seqlens_q && p.total_q == 0)) return 0;
  if (p.cu_seqlens_q) return (p.total_q / block_m + p.batch_size) * p.num_heads;
  return (p.seqlen_q + block_m - 1) / block_m * p.num_heads * p.batch_size;
}

// `packed_heads`: those that the kernel itself packs.
inline LaunchShape make_launch_shape(const AttentionParams& p, const Plan& plan,
                                     std::int64_t packed_heads = 1) {
  constexpr double kLog2e = 1.4426950408889634;
  LaunchShape shape;
  // An empty problem has no blocks to divide.
  const auto divider = [](std::int64_t n) {
    return Divider(static_cast<std::uint32_t>(greater<std::int64_t>(n, 1)));
  };
  shape.num_m_blocks = divider((p.seqlen_q * packed_heads + plan.block_m - 1) / plan.block_m);
  shape.num_heads = divider(p.num_heads / packed_heads);
  shape.heads_per_kv_head = divider(p.num_heads / greater<std::int64_t>(p.num_heads_kv, 1));
  shape.packed_heads = divider(packed_heads);
  // seed: copy-bytes
  shape.copy_bytes = plan.copy_bytes;
  // seed: store-bytes
  shape.store_bytes = core::store_bytes(p);
  shape.bias_load_bytes = core::score_load_bytes(p, p.bias, size_of(p.bias.dtype));
  shape.mask_load_bytes = core::score_load_bytes(p, p.mask, 1);
  shape.window = window_of<int>(p);
  shape.scale_log2 = static_cast<float>(p.softmax_scale * kLog2e);
  shape.softmax_scale = static_cast<float>(p.softmax_scale);
  shape.softcap = static_cast<float>(p.softcap);
  shape.inverse_softcap = p.softcap != 0.0 ? static_cast<float>(1.0 / p.softcap) : 0.0f;
  shape.natural = p.softcap != 0.0 || p.alibi_slopes.data || p.bias.data;
  shape.longest_first = p.causal != Causal::kNone;
  const auto heads = static_cast<std::uint32_t>(p.num_heads / packed_heads * p.batch_size);
  const std::uint32_t heads_left = plan.all_heads_together ? heads : heads % kHeadsTogether;
  shape.heads_in_groups = heads - heads_left;
  shape.heads_left = divider(heads_left);
  return shape;
}

}  // namespace dlattn
