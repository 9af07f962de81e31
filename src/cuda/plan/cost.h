#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/plan/family.h"
#include "core/plan/plan.h"
#include "core/problem/positions.h"
#include "cuda/plan/tile_config.h"
#include "dlattn/attention.h"

// Plain host code that the plans of the families share: the fields of a tile, and the model of
// their times. The model counts the thread blocks of a problem and the keys that they visit, and
// predicts the time that the busiest SM takes for them.
namespace dlattn::cost {

// The times of a tile shape, in nanoseconds: for one block on an SM, and for as many as fit.
struct Speed {
  double fixed;  // of a block beside its keys: launch, first copies, epilogue
  double alone;  // per key, a block that has its SM to itself: latencies
  double busy;   // per key and block, blocks that fill their SM
};

// Blocks of a problem, and the keys that they visit: on average, and the most.
struct Walk {
  double blocks, mean, longest;
  // Blocks beside them: those of a varlen batch, where every sequence has as many as the longest.
  double empty = 0.0;
};

// The time for which a block without rows keeps an SM from others, in nanoseconds, on an H200.
constexpr double kEmptyBlock = 140.0;

// Queries and keys of a sequence; of packed ones, whose lengths the host does not know, on average.
// Keys in a cache are not packed, whatever the queries are.
inline double mean_seqlen_q(const AttentionParams& p) {
  const double batch = static_cast<double>(std::max<std::int64_t>(p.batch_size, 1));
  return p.cu_seqlens_q ? p.total_q / batch : static_cast<double>(p.seqlen_q);
}
inline double mean_seqlen_k(const AttentionParams& p) {
  const double batch = static_cast<double>(std::max<std::int64_t>(p.batch_size, 1));
  return p.cu_seqlens_k ? p.total_k / batch : static_cast<double>(p.seqlen_k);
}

// The keys of a sequence that any of its queries sees: of some lengths, and on average.
inline double keys_seen(const AttentionParams& p, double seqlen_q, double seqlen_k) {
  const Window<std::int64_t> window = window_of<std::int64_t>(p);
  // The first query's position is 0, or the last one's is that of the last key.
  const std::int64_t beyond = p.causal == Causal::kTopLeft ? window.right : window.left;
  return std::min(seqlen_k, seqlen_q + static_cast<double>(beyond));
}
inline double mean_keys_seen(const AttentionParams& p) {
  return keys_seen(p, mean_seqlen_q(p), mean_seqlen_k(p));
}

inline Walk walk(const AttentionParams& p, int block_m, int packed_heads) {
  const double batch = static_cast<double>(std::max<std::int64_t>(p.batch_size, 1));
  const double queries = mean_seqlen_q(p), keys = mean_keys_seen(p);
  const double longest =
      keys_seen(p, static_cast<double>(p.seqlen_q), static_cast<double>(p.seqlen_k));
  const double heads = static_cast<double>(p.num_heads / packed_heads);
  const double block_queries = static_cast<double>(block_m) / packed_heads;
  Walk walk;
  const auto blocks = [&](double rows) { return std::ceil(rows / block_queries) * heads * batch; };
  walk.blocks = blocks(std::max(queries, 1.0));
  if (p.cu_seqlens_q)
    walk.empty = std::max(blocks(static_cast<double>(p.seqlen_q)) - walk.blocks, 0.0);
  walk.mean = keys;
  walk.longest = longest;
  if (p.causal != Causal::kNone) {
    // The last query sees all keys, the first as many fewer as there are queries; a block visits
    // those of its last one.
    const double first = std::max(keys - queries, 0.0);
    walk.mean = std::min(keys, (first + keys) / 2 + block_queries / 2);
  }
  const Window<std::int64_t> window = window_of<std::int64_t>(p);
  if (window.is_bounded()) {
    const double span = static_cast<double>(window.left + window.right + 1) + block_queries;
    walk.mean = std::min(walk.mean, span);
    walk.longest = std::min(walk.longest, span);
  }
  return walk;
}

// Nanoseconds of the busiest SM, which works its blocks off in rounds of `resident`. Per key a
// round takes what a block alone does, or what all of them need of the SM.
inline double rounds_ns(const Walk& w, const Speed& speed, double num_sms, double resident) {
  const auto per_key = [&](double blocks) { return std::max(speed.alone, blocks * speed.busy); };
  const double sms = std::max(num_sms, 1.0), on_busiest = std::ceil(w.blocks / sms);
  const double empty = w.empty / sms * kEmptyBlock;
  if (on_busiest <= resident) {  // the longest block goes on alone
    return empty + speed.fixed + w.mean * per_key(on_busiest) + (w.longest - w.mean) * speed.alone;
  }
  const double rounds = std::floor(on_busiest / resident);
  const double rest = on_busiest - rounds * resident;
  return empty + std::ceil(on_busiest / resident) * speed.fixed +
         w.mean * (rounds * per_key(resident) + (rest > 0 ? per_key(rest) : 0.0));
}

constexpr double kH200Rate = 4850.0;

// Products of mma.sync per SM, in operations per nanosecond, by data sheet but for the H200, where
// it was measured. Rates of devices of one compute capability differ by up to two; on the slow ones
// of 8.6 and later the tensor cores bound every shape, so that shapes compare alike.
inline double tensor_rate(const DeviceInfo& device) {
  if (device.compute_major == 9) return kH200Rate;
  return device.compute_major == 8 && device.compute_minor == 0 ? 2889.0 : 1700.0;
}

// Bytes that a device reads of its memory in a nanosecond, by data sheet less a tenth; of devices
// that are not told apart here, the slower one's.
inline double memory_rate(const DeviceInfo& device) {
  if (device.compute_major == 9) return 4000.0;
  if (device.compute_major >= 10) return device.num_sms >= 160 ? 1600.0 : 800.0;
  if (device.compute_minor == 0) return 1400.0;
  return device.num_sms < 60 ? 270.0 : 850.0;
}

// The least time in which all keys that are seen can be read once, in nanoseconds. With few queries
// that is the time.
inline double keys_ns(const AttentionParams& p, const DeviceInfo& device) {
  const double keys = mean_keys_seen(p) * static_cast<double>(p.num_heads_kv * p.batch_size);
  const auto bytes =
      static_cast<double>(p.head_dim * size_of(p.k.dtype) + p.head_dim_v * size_of(p.v.dtype));
  return keys * bytes / memory_rate(device);
}
// The factor by which blocks that have all keys of their rows stay behind that.
constexpr double kBehindMemory = 1.06;

// The factor by which kernels whose blocks have all keys of a sequence are taken to be slower than
// predicted where a cache's keys are for few queries. The lengths are on the device; where they
// differ, decode divides the keys evenly, and the model does not tell.
inline double few_rows_of_cache(const AttentionParams& p) {
  constexpr std::int64_t kFewRows = 32;  // of queries, of a KV head
  constexpr double kMargin = 2.0;
  return is_cache(p) && p.seqlen_q * (p.num_heads / p.num_heads_kv) <= kFewRows ? kMargin : 1.0;
}

// Family::varies_with_batch of kernels for many queries. Keys in a cache with batch_invariant have
// one kernel, whatever the number of new queries is: that for few.
inline std::string varies_in_caches(const AttentionParams& p) {
  if (!is_cache(p)) return {};
  return core::concat(
      "does not read keys in a cache with batch_invariant: ", core::cache_feature(p), " is given");
}
// The same of kernels that take sequences in one form alone: packed ones, and those of other
// strides, would get other bits.
inline std::string varies_with_form(const AttentionParams&) {
  return "does not run with batch_invariant unless it is named";
}

// Sets what a tile shape says of a plan, with one thread block for each tile of rows.
inline void set_tile(const AttentionParams& p, const TileConfig& config, Plan* plan) {
  plan->block_m = config.block_m;
  plan->block_n = config.block_n;
  plan->num_warps = config.num_warps;
  plan->num_stages = config.num_stages;
  plan->smem_bytes = config.smem_bytes;
  const std::int64_t rows = p.seqlen_q * plan->packed_heads;
  const std::int64_t m_blocks = (rows + config.block_m - 1) / config.block_m;
  plan->grid = m_blocks * (p.num_heads / plan->packed_heads) * p.batch_size;
}

// The plan of a family with one tile shape, of whose blocks an SM is taken to hold one.
inline void plan_one_shape(const AttentionParams& p, const DeviceInfo& device,
                           const TileConfig& config, const Speed& speed, Plan* plan) {
  set_tile(p, config, plan);
  const double ns = rounds_ns(walk(p, plan->block_m, 1), speed, device.num_sms, 1.0);
  plan->predicted_ns = std::max(ns, speed.fixed + kBehindMemory * keys_ns(p, device));
}

// The times of a thread block that has an SM to itself, in nanoseconds.
struct OnePerSmSpeed {
  double first;    // beside its keys: launch, set-up, first copies, epilogue
  double next;     // the same of each one after it
  double per_key;  // with all its rows in use
  double latency;  // per key, at least, however few the rows

  // Per key where sequences have `rows` queries: groups of a block's rows that have none cost
  // nothing, as the others have their share of the tensor cores.
  double of_key(double rows, int block_m, int group_rows) const {
    const double groups = std::max(std::ceil(std::min<double>(rows, block_m) / group_rows), 1.0);
    const double used = groups / (block_m / group_rows);
    return std::max(latency, per_key * std::min(used, 1.0));
  }
};

// A grid of such blocks, a key of which takes `per_key`. `tail`: by what part of how far the
// longest walk exceeds the mean the last SM ends later.
inline double one_block_per_sm_ns(const AttentionParams& p, const Walk& walk,
                                  const DeviceInfo& device, const OnePerSmSpeed& speed,
                                  double per_key, double tail) {
  const double share = walk.blocks / std::max(device.num_sms, 1), rounds = std::ceil(share);
  if (rounds <= 1.0) return speed.first + walk.longest * per_key;
  if (walk.longest <= walk.mean || p.cu_seqlens_q)
    return speed.first + (rounds - 1) * speed.next + rounds * walk.mean * per_key;
  // Walks of different lengths fill the SMs evenly, up to a part of the last one.
  return speed.first + (share - 1) * speed.next +
         per_key * (std::max(walk.longest, share * walk.mean) + tail * (walk.longest - walk.mean));
}

}  // namespace dlattn::cost
