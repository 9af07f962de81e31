#pragma once

#include <cstdint>

#include "core/util/inline.h"
#include "cuda/forward/sm90/score_params.h"
#include "cuda/plan/head_groups.h"
#include "cuda/plan/launch_shape.h"
#include "dlattn/forward.h"

// How many heads are walked together under causality: plain host code, for plans and launches.
namespace dlattn::sm90 {

constexpr std::int64_t kMostInL2 = 40'000'000;  // bytes of keys and values
constexpr std::int64_t kFewOfWide = 12;         // heads; divides an H200's SMs

// Whether all heads are walked together: where their keys fit L2 beside each other, the longest
// walks then begin first of all, and those of few rounds end together.
inline bool walks_all_heads_together(const AttentionParams& p) {
  if (p.causal == Causal::kNone || p.cu_seqlens_q) return false;
  const std::int64_t key_bytes = (p.head_dim + p.head_dim_v) * size_of(p.k.dtype);
  const std::int64_t heads = p.batch_size * p.num_heads_kv;
  return heads <= kMostInL2 / key_bytes && p.seqlen_k <= kMostInL2 / key_bytes &&
         heads * p.seqlen_k <= kMostInL2 / key_bytes;
}

// Heads that are walked together, of all batch entries. The more there are, the shorter are the
// walks that a grid ends with; but beside the keys of those under way L2 holds the next ones' and
// what the blocks read and write. Eight whose keys it does not hold are too many, but where a grid
// has few rounds, whose end the longer walks of fewer heads would put off. The shares of persistent
// blocks are even with few: of eight row blocks a head, above head_dim 128 of four too, a block has
// each length equally often with four heads after half as many rounds as with eight. Of eight row
// blocks above 128 twelve heads have the same, and rounds of few lengths. With modified scores and
// windows, of which no figures tell, there are eight, too.
inline std::int64_t heads_together(const AttentionParams& p, int block_m, bool persistent) {
  constexpr std::int64_t kMostBytes = 16 << 20, kFew = kHeadsTogether;
  constexpr double kManyBlocks = 924;  // seven for each SM of an H200
  if (walks_all_heads_together(p)) return greater<std::int64_t>(p.batch_size * p.num_heads, 1);
  if (p.causal == Causal::kNone || p.cu_seqlens_q || p.seqlen_k == 0) return kFew;
  if (score_mod_of(p) != ScoreMod::kNone || p.window_left >= 0) return kFew;
  const std::int64_t row_blocks = (p.seqlen_q + block_m - 1) / block_m;
  if (persistent) {
    const bool wide = p.head_dim > 128;
    if (row_blocks % 8 == 0) return wide ? kFewOfWide : kFew / 2;
    return wide && row_blocks == 4 ? kFew / 2 : kFew;
  }
  // In floating point: a product of any sizes may be more than 64 bits hold.
  const double head_bytes = static_cast<double>(p.head_dim + p.head_dim_v) *
                            static_cast<double>(size_of(p.k.dtype)) *
                            static_cast<double>(p.seqlen_k) * static_cast<double>(p.num_heads_kv) /
                            static_cast<double>(p.num_heads);
  const double blocks = static_cast<double>(row_blocks) * static_cast<double>(p.num_heads) *
                        static_cast<double>(p.batch_size);
  if (kFew * head_bytes > kMostInL2 && blocks >= kManyBlocks)
    return greater<std::int64_t>(static_cast<std::int64_t>(kMostBytes / head_bytes), 1);
  std::int64_t together = kFew;
  while (2.0 * static_cast<double>(together) * head_bytes <= kMostBytes) together *= 2;
  return together;
}

// The same as a launch takes it.
inline HeadGroups head_groups(const AttentionParams& p, int block_m, bool persistent) {
  return make_head_groups(p.batch_size * p.num_heads, heads_together(p, block_m, persistent));
}

}  // namespace dlattn::sm90
