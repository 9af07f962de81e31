#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem/limits.h"
#include "core/problem/positions.h"
#include "dlattn/forward.h"

// The number of thread blocks of a grid of persistent thread blocks on Hopper, as plain host code.
namespace dlattn::cuda {

// The most keys that a block of `rows` queries walks.
inline std::int64_t longest_walk(const AttentionParams& p, std::int64_t rows) {
  const Window<std::int64_t> window = window_of<std::int64_t>(p);
  if (!window.is_bounded()) return p.seqlen_k;
  // Each side by itself: their sum may be more than 64 bits hold.
  const std::int64_t left = std::min(window.left, p.seqlen_k);
  return std::min(p.seqlen_k, left + std::min(window.right, p.seqlen_k) + rows);
}

// Thread blocks for `tiles` work tiles of `rows` queries. Walks up to `few_keys` keys are short,
// or up to `few_keys_alike` where all are of one length.
inline std::int64_t num_blocks(const AttentionParams& params, const DeviceInfo& device,
                               std::int64_t tiles, std::int64_t rows, std::int64_t few_keys,
                               std::int64_t few_keys_alike = 2048) {
  // A persistent block hides the next work tile's first copies and its own set-up, which counts
  // where work tiles are short. But its share is fixed, and the hardware's order of blocks spreads
  // work tiles more evenly, which counts where they are long, few or, under causality, of different
  // lengths, of which a share of few rounds does not have all.
  constexpr std::int64_t kManyRounds = 7;
  if (tiles < kManyRounds * device.num_sms || tiles > core::kMaxGrid) return tiles;
  const std::int64_t walk = longest_walk(params, rows);
  const bool short_walk = walk <= few_keys;
  const bool causal = params.causal != Causal::kNone;
  const bool window = walk < params.seqlen_k;
  // A window makes work tiles alike, causality does not; those of varlen are never alike.
  if (params.cu_seqlens_q && (window || !causal)) return short_walk ? device.num_sms : tiles;
  if (window) return walk - rows <= few_keys ? device.num_sms : tiles;
  if (!causal) return walk <= few_keys_alike ? device.num_sms : tiles;
  const std::int64_t tiles_of_head =
      tiles / std::max<std::int64_t>(params.num_heads * params.batch_size, 1);
  const std::int64_t rounds = (tiles + device.num_sms - 1) / device.num_sms;
  return short_walk && rounds >= 2 * tiles_of_head ? device.num_sms : tiles;
}

}  // namespace dlattn::cuda
