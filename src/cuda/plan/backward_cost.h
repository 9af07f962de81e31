#pragma once

#include <algorithm>
#include <cmath>

#include "cuda/plan/cost.h"

// The times of the launches of backward passes, whose constants are an H200's
// (research/steps/h200-backward-choices.json).
namespace dlattn::cost {

// The whole tiles of `rows` queries by `keys` keys of a head that are not all hidden: their pairs
// of a query and a key, and the queries that the longest walk of a block of keys passes; the same
// of keys for a block of queries.
struct SeenTiles {
  double pairs, queries, keys;
};
inline SeenTiles seen_tiles(const AttentionParams& p, double rows, double keys) {
  const auto whole = [](double n, double tile) { return std::ceil(n / tile) * tile; };
  const double num_queries = mean_seqlen_q(p), num_keys = mean_seqlen_k(p);
  const auto longest_q = static_cast<double>(p.seqlen_q),
             longest_k = static_cast<double>(p.seqlen_k);
  SeenTiles seen{whole(num_queries, rows) * whole(num_keys, keys), whole(longest_q, rows),
                 whole(longest_k, keys)};
  if (p.causal != Causal::kNone) {
    // The queries that see a part of the keys, as many as the keys that a part of the queries
    // sees; the rest of either sees, or is seen by, all of them.
    const double both = std::min(num_queries, num_keys);
    const bool is_top_left = p.causal == Causal::kTopLeft;
    const double rest = (is_top_left ? num_queries : num_keys) - both;
    seen.pairs = std::min(seen.pairs, both * ((both + rows + keys) / 2.0 + rest));
    const double longest = std::min(longest_q, longest_k);
    if (is_top_left) {
      seen.keys = whole(longest, keys);
    } else {
      seen.queries = whole(longest, rows);
    }
  }
  const Window<std::int64_t> window = window_of<std::int64_t>(p);
  if (window.is_bounded()) {
    const double span = static_cast<double>(window.left + window.right + 1) + rows + keys;
    seen.pairs = std::min(seen.pairs, num_queries * span);
    seen.queries = std::min(seen.queries, span);
    seen.keys = std::min(seen.keys, span);
  }
  return seen;
}

// Blocks of `rows` of `seqlen` on average, of all of `heads`.
inline double mean_blocks(const AttentionParams& p, double seqlen, double rows, double heads) {
  return std::ceil(seqlen / rows) * heads * static_cast<double>(p.batch_size);
}

// A grid of `blocks`, one on an SM at a time, that take `work` nanoseconds in all, the longest one
// `longest`. Blocks of one length run in rounds. Of different ones the last SM ends with a part of
// one.
inline double grid_ns(const AttentionParams& p, const DeviceInfo& device, double work,
                      double longest, double blocks) {
  const double sms = std::max(static_cast<double>(device.num_sms), 1.0);
  const double share = blocks / sms;
  if (share <= 1.0) return std::max(longest, work / sms);
  const bool differ = p.causal != Causal::kNone || window_of<std::int64_t>(p).is_bounded() ||
                      p.cu_seqlens_q || p.cu_seqlens_k;
  return std::max(longest,
                  differ ? work / sms + longest / 2.0 : std::ceil(share) / share * work / sms);
}

// To read out and dout, to write dk and dv, and, where dq is added up in global memory, to clear,
// read and round that.
inline double rows_ns(const BackwardParams& b, const DeviceInfo& device, int head_dim_tile,
                      bool sums_dq) {
  constexpr double kShare = 0.85;  // of memory's rate
  const AttentionParams& p = b.forward;
  const auto batch = static_cast<double>(p.batch_size);
  const double rows = mean_seqlen_q(p) * static_cast<double>(p.num_heads) * batch;
  const double keys = mean_seqlen_k(p) * static_cast<double>(p.num_heads_kv) * batch;
  const double columns = static_cast<double>(p.head_dim + p.head_dim_v) / 2.0;
  double bytes = rows * columns * 4.0;
  if (sums_dq) bytes += rows * (8.0 * head_dim_tile + 2.0 * columns);
  if (b.dk.data || b.dv.data) bytes += keys * columns * 8.0;
  return bytes / (kShare * memory_rate(device));
}

// The time of products by mma.sync for one pair of a query and a key, in nanoseconds of an SM.
inline double mma_pair_ns(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                          double products, double efficiency) {
  // Lanes load numbers of a bias and a mask one by one.
  const double score_mod = 1.0 + (p.bias.data ? 0.75 : 0.0) + (p.mask.data ? 1.3 : 0.0) +
                           (p.softcap != 0.0 ? 0.47 : 0.0) + (p.alibi_slopes.data ? 0.38 : 0.0);
  return 2.0 * products * head_dim_tile * score_mod / (tensor_rate(device) * efficiency);
}

constexpr double kMmaLaunch = 5600.0;  // with its first copies and last stores

}  // namespace dlattn::cost
