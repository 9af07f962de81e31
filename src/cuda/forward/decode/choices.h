#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "core/plan/code.h"
#include "core/util/ceil_div.h"
#include "cuda/forward/decode/traits.h"
#include "cuda/plan/cost.h"
#include "cuda/tile/accumulation_limits.h"
#include "cuda/tile/key_parts/divisions.h"
#include "dlattn/attention.h"

// The model of the times of decode's blocks, and clusters beside the ways to divide keys that
// families share (key_parts/divisions.h), as plain host code for decode's plan.
namespace dlattn::decode {

// The times of a tile shape, in nanoseconds. Measured on an H200
// (research/steps/h200-choices-blocks.json).
struct Times {
  double first;    // of a block, launch and first copies
  double next;     // of each further row block, which begins with empty stages
  double per_key;  // of a block, alone on its SM or beside another
};
// The time that adding up the parts in the workspace takes; the time that it takes more if that
// kernel must read lengths first; and the time that clusters of four blocks and more cost where
// they have more than half of the SMs. The last two were seen on an H100 (research/LOG.md,
// 2026-11-26).
constexpr double kCombine = 1000.0, kCombineOfLengths = 1600.0;
constexpr double kOfManyClusters = 1000.0;

// The factor by which modified scores make a key slower.
inline double modified(const AttentionParams& p) {
  return p.mask.data ? 2.7 : is_general(p) ? 1.3 : 1.0;
}

inline Times times(const AttentionParams& p, int head_dim_tile, int variant) {
  const bool in_8_bits = is_8_bit_cache(p);
  // Measured on an H200, of latents; V of its own takes as much longer as it has bytes, but in 8
  // bits, where bytes are not the bound (research/steps/h200-latents-8-bit.json).
  if (is_wide(head_dim_tile)) {
    const double of_keys = in_8_bits ? 0.88 : is_latent(p) ? 1.0 : 1.9;
    return {9000.0, 6000.0, (variant == kRows16 ? 92.0 : 82.0) * of_keys * modified(p)};
  }
  const double of_bytes = in_8_bits ? 0.65 : 1.0;
  const double of_rows = variant == kRows16 ? 11.0 : 12.0;
  const double per_key = of_bytes * of_rows * head_dim_tile / 128.0 * modified(p);
  if (head_dim_tile > 128) return {8200.0, 3950.0, per_key};
  // Fitted to few keys (research/steps/h200-choices-windows.json).
  const double first =
      4250.0 + (variant == kRows16 ? 0.0 : 1250.0) + 14.0 * std::max(head_dim_tile - 64, 0);
  return {first, 5700.0, per_key};
}

inline int key_bytes(const AttentionParams& p) {
  return static_cast<int>(size_of(p.k.dtype));
}

// The bytes of a key that are read.
inline std::int64_t bytes_of_key(const AttentionParams& p, int head_dim_tile) {
  const bool once = is_wide(head_dim_tile) && is_latent(p);
  return (p.head_dim + (once ? 0 : p.head_dim_v)) * key_bytes(p);
}

// How many blocks an SM holds; registers leave room for two of 16 rows, and one of 32.
inline std::int64_t resident_blocks(const TileConfig& config, const DeviceInfo& device,
                                    int variant) {
  constexpr std::int64_t kReservedSmem = 1024;  // bytes per block that CUDA takes for itself
  const std::int64_t by_smem = device.smem_per_sm / (config.smem_bytes + kReservedSmem);
  return std::clamp<std::int64_t>(by_smem, 1, variant == kRows16 ? 2 : 1);
}

constexpr int kClusterSizes[] = {2, 4, 8};

// The rows of a block that cost products: with wide heads 16 rows that do not exist cost none.
inline std::int64_t rows_of_block(const AttentionParams& p, const TileConfig& config, bool wide) {
  if (!wide) return config.block_m;
  const std::int64_t rows = p.seqlen_q * (p.num_heads / p.num_heads_kv);
  return std::min<std::int64_t>(config.block_m, core::ceil_div(rows, 16) * 16);
}

// The part of the row blocks that there is for queries of variable length over a cache, of which
// other families may take many: a step that mixes a prompt with single tokens has few.
inline double used_row_blocks(const AttentionParams& p, int block_m) {
  if (!is_cache(p) || !p.cu_seqlens_q) return 1.0;
  const std::int64_t rows = p.total_q * (p.num_heads / p.num_heads_kv);
  const std::int64_t most = (rows / block_m + p.batch_size) * p.num_heads_kv;
  const std::int64_t all = std::max<std::int64_t>(num_row_blocks(p, block_m), 1);
  return std::min(static_cast<double>(most) / static_cast<double>(all), 1.0);
}

// A shape's blocks, and what a problem takes on them.
inline BlockModel block_model(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                              int variant) {
  const TileConfig config = tile_config(head_dim_tile, variant, key_bytes(p));
  const Times of_shape = times(p, head_dim_tile, variant);
  const bool wide = is_wide(head_dim_tile), lengths_known = host_knows_lengths(p);
  BlockModel model;
  model.block_m = config.block_m;
  model.block_n = config.block_n;
  model.resident = resident_blocks(config, device, variant);
  // With wide heads one accumulator adds up all keys of a row block (tile/accumulation_limits.h).
  model.least_tiles = wide ? 64 / config.block_n : 2;
  if (wide) model.most_keys = tile::kMostKeys;

  // A block that does not know the lengths reads those of all sequences, a warp's at a time, and
  // then looks for its own among them.
  constexpr double kOfLengths = 600.0;
  const auto reads_of_lengths = static_cast<double>(core::ceil_div(p.batch_size, 32));
  model.first = of_shape.first + (lengths_known ? 0.0 : kOfLengths * reads_of_lengths);
  model.next = of_shape.next;
  model.per_key = of_shape.per_key;
  model.combine = kCombine + (lengths_known ? 0.0 : kCombineOfLengths);
  // Every row block has the tiles that a row of its sequence sees, causal or not.
  model.keys = std::max(cost::mean_keys_seen(p), 1.0);
  // Windows leave fewer tiles than there are blocks for; a block has at least one.
  model.least_keys = std::min<double>(config.block_n, model.keys);
  model.used = used_row_blocks(p, config.block_m);

  const std::int64_t bytes = bytes_of_key(p, head_dim_tile);
  const std::int64_t of_both = (p.head_dim + p.head_dim_v) * key_bytes(p);
  model.least = cost::keys_ns(p, device);
  if (bytes != of_both) model.least *= static_cast<double>(bytes) / static_cast<double>(of_both);
  // Every row block reads its keys, all but the first from L2: some 43 bytes a nanosecond and SM.
  constexpr double kL2Rate = 43.0;
  const std::int64_t row_blocks = num_row_blocks(p, config.block_m);
  const double reads = model.keys * model.used * static_cast<double>(row_blocks * bytes);
  // Tensor cores are fed by too few warps to be more than a quarter busy, which is enough for
  // memory; those of wide heads by shared memory, which is estimated, not measured.
  const double busy = wide ? 0.48 : 0.26;
  const double products = 4.0 * model.keys * head_dim_tile * modified(p) * model.used *
                          static_cast<double>(row_blocks * rows_of_block(p, config, wide));
  model.least_of_sms = std::max(reads / kL2Rate, products / (busy * cost::tensor_rate(device)));
  return model;
}

// Clusters beside the other ways to divide keys.
class ClusterPartition : public WorkPartition {
 public:
  ClusterPartition(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                   int variant)
      : WorkPartition(p, device, block_model(p, device, head_dim_tile, variant)),
        one_sequence_(p.batch_size == 1),
        has_clusters_(!is_wide(head_dim_tile) && device.compute_major == 9 &&
                      core::has_code(device, 90, nullptr)) {}

  // Whether one sequence may have many keys and the others few, for all that the host knows: then
  // a block with its whole row block goes on long after the others, and the model of either way,
  // for which all are as long as they can be, does not tell. Up to some 400 keys that costs less
  // than to add up parts.
  bool may_be_uneven() const {
    constexpr double kLittle = 4400.0;
    return !lengths_known_ && model_.keys * model_.per_key > kLittle;
  }

  // A cluster of so many blocks for each row block, with a part of its keys each. They add it up in
  // shared memory, which takes no time to speak of: there is no workspace and no second kernel.
  Choice in_clusters(int size) const {
    const std::int64_t grid = std::max<std::int64_t>(row_blocks_, 1) * size;
    const bool many = size > 2 && 2 * grid > num_sms_;
    const double time = ns(1.0 / static_cast<double>(size), 1.0, grid);
    Choice clusters = choice({}, size, grid, time + (many ? kOfManyClusters : 0.0));
    clusters.cluster_size = size;
    return clusters;
  }
  // Whether there are clusters of that size, an SM for each of their blocks, and tiles for all of
  // these. A cluster's blocks are in one group of some 16 SMs, so a few SMs are left over.
  bool has_clusters(int size) const {
    const bool is_size = std::count(std::begin(kClusterSizes), std::end(kClusterSizes), size) > 0;
    return is_size && has_clusters_ && size <= tiles_ &&
           row_blocks_ * size <= num_sms_ / size * size;
  }
  // Whether they may be taken: not where one sequence may be long and the others short, for a row
  // block's keys are one cluster's.
  bool may_be_clusters(int size) const {
    return has_clusters(size) && (lengths_known_ || one_sequence_);
  }

 private:
  bool one_sequence_, has_clusters_;
};

}  // namespace dlattn::decode
