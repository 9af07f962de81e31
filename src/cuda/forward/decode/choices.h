#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>

#include "core/plan/code.h"
#include "core/problem/limits.h"
#include "core/util/ceil_div.h"
#include "cuda/forward/decode/traits.h"
#include "cuda/plan/cost.h"
#include "cuda/tile/accumulation_limits.h"
#include "cuda/tile/key_parts/shape.h"
#include "dlattn/attention.h"

// The ways to divide keys among thread blocks, and the model of their times, as plain host code for
// decode's plan.
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
  // Measured on an H200, of latents; V of its own takes as much longer as it has bytes.
  if (is_wide(head_dim_tile)) {
    const double of_values = is_latent(p) ? 1.0 : 1.9;
    return {9000.0, 6000.0, (variant == kRows16 ? 92.0 : 82.0) * of_values * modified(p)};
  }
  const double of_bytes = is_8_bit_cache(p) ? 0.65 : 1.0;
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

// How the keys of a row block are divided among thread blocks: not at all; into so many parts; into
// parts of so many keys; else evenly.
struct Division {
  bool whole = true;
  int num_splits = 0;
  std::int64_t split_size = 0;
};

// A way to run a problem, and the time that it is predicted to take. It is infinite for none.
struct Choice {
  int variant = 0;
  Division division;
  std::int64_t num_splits = 1;  // of a row block, at most
  std::int64_t grid = 0;
  double ns = std::numeric_limits<double>::infinity();
  int cluster_size = 1;
};
constexpr int kClusterSizes[] = {2, 4, 8};

// The part of the row blocks that there is for queries of variable length over a cache, of which
// other families may take many: a step that mixes a prompt with single tokens has few.
inline double used_row_blocks(const AttentionParams& p, int block_m) {
  if (!is_cache(p) || !p.cu_seqlens_q) return 1.0;
  const std::int64_t rows = p.total_q * (p.num_heads / p.num_heads_kv);
  const std::int64_t most = (rows / block_m + p.batch_size) * p.num_heads_kv;
  const std::int64_t all = std::max<std::int64_t>(num_row_blocks(p, block_m), 1);
  return std::min(static_cast<double>(most) / static_cast<double>(all), 1.0);
}

// How a problem is dealt to the blocks of a shape, and what that takes.
class WorkPartition {
 public:
  WorkPartition(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile, int variant)
      : variant_(variant),
        config_(tile_config(head_dim_tile, variant, key_bytes(p))),
        times_(times(p, head_dim_tile, variant)),
        is_wide_(is_wide(head_dim_tile)) {
    row_blocks_ = num_row_blocks(p, config_.block_m);
    used_ = used_row_blocks(p, config_.block_m);
    heads_ = std::max<std::int64_t>(1, p.batch_size * p.num_heads_kv);
    // Every row block has the tiles that a row of its sequence sees, causal or not.
    keys_ = std::max(cost::mean_keys_seen(p), 1.0);
    tiles_ = core::ceil_div(p.seqlen_k, config_.block_n);
    lengths_known_ = !p.cu_seqlens_q && !p.cu_seqlens_k && !p.seqused_k && !p.leftpad_k;
    // Else every block reads the lengths of all sequences, a warp's at a time, and then looks for
    // its own among them.
    constexpr double kOfLengths = 600.0;
    if (!lengths_known_)
      times_.first += kOfLengths * static_cast<double>(core::ceil_div(p.batch_size, 32));
    num_sms_ = std::max(device.num_sms, 1);
    slots_ = resident_blocks(config_, device, variant) * num_sms_;
    one_sequence_ = p.batch_size == 1;
    has_clusters_ = !is_wide_ && device.compute_major == 9 && core::has_code(device, 90, nullptr);
    // Every row block reads its keys, all but the first from L2: some 43 bytes a nanosecond and SM.
    constexpr double kL2Rate = 43.0;
    const std::int64_t bytes = bytes_of_key(p, head_dim_tile);
    const double reads = keys_ * used_ * static_cast<double>(row_blocks_ * bytes);
    // Tensor cores are fed by too few warps to be more than a quarter busy, which is enough for
    // memory; those of wide heads by shared memory, which is estimated, not measured.
    const double busy = is_wide_ ? 0.48 : 0.26;
    const double products = 4.0 * keys_ * head_dim_tile * modified(p) * used_ *
                            static_cast<double>(row_blocks_ * rows_of_block(p));
    memory_ns_ = cost::keys_ns(p, device);
    const std::int64_t of_both = (p.head_dim + p.head_dim_v) * key_bytes(p);
    if (bytes != of_both) memory_ns_ *= static_cast<double>(bytes) / static_cast<double>(of_both);
    busy_ns_ = std::max(reads / kL2Rate, products / (busy * cost::tensor_rate(device)));
  }

  // The units as kernels count them, at most: tiles, and what it takes to begin (schedule.cuh).
  double most_units() const {
    return static_cast<double>(row_blocks_) *
           static_cast<double>(tiles_ + fixed_overhead_tiles(config_.block_n));
  }

  // Keys are dealt evenly, to as many blocks as the device holds.
  Choice in_parts() const {
    const std::int64_t grid = blocks_of_parts();
    const double row_blocks = static_cast<double>(row_blocks_) / static_cast<double>(grid);
    const std::int64_t splits = std::max<std::int64_t>(2, grid / heads_);
    Division evenly;
    evenly.whole = false;
    if (!adds_up(most_keys_dealt())) return {};
    return choice(evenly, splits, grid, ns(row_blocks, std::ceil(row_blocks)) + combine_ns());
  }
  // Whether one sequence may have many keys and the others few, for all that the host knows: then
  // a block with its whole row block goes on long after the others, and the model of either way,
  // for which all are as long as they can be, does not tell. Up to some 400 keys that costs less
  // than to add up parts.
  bool may_be_uneven() const {
    constexpr double kLittle = 4400.0;
    return !lengths_known_ && keys_ * times_.per_key > kLittle;
  }
  // Parts of so many keys or of such a number, a block for each, in rounds.
  Choice split(const Division& division) const {
    const std::int64_t splits = parts_of(division), parts = row_blocks_ * splits;
    const std::int64_t each = division.split_size > 0
                                  ? division.split_size
                                  : core::ceil_div(tiles_, splits) * config_.block_n;
    if (!adds_up(std::min(each, tiles_ * config_.block_n))) return {};
    const std::int64_t grid = std::clamp<std::int64_t>(parts, 1, slots_);
    const double rounds = static_cast<double>(core::ceil_div(parts, grid));
    const double share = 1.0 / static_cast<double>(splits);
    return choice(division, splits, grid, ns(rounds * share, rounds) + combine_ns());
  }
  // The most parts that a row block can have.
  std::int64_t parts_of(const Division& division) const {
    const std::int64_t tiles = std::max<std::int64_t>(tiles_, 1);
    if (division.num_splits > 0) return std::min<std::int64_t>(division.num_splits, tiles);
    return core::ceil_div(tiles, division.split_size / config_.block_n);
  }

  // A cluster of so many blocks for each row block, with a part of its keys each. They add it up in
  // shared memory, which takes no time to speak of: there is no workspace and no second kernel.
  Choice in_clusters(int size) const {
    const std::int64_t grid = std::max<std::int64_t>(row_blocks_, 1) * size;
    const bool many = size > 2 && 2 * grid > num_sms_;
    const double time = ns(1.0 / static_cast<double>(size), 1.0, grid);
    Choice clusters = choice(Division(), size, grid, time + (many ? kOfManyClusters : 0.0));
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

  // Whole row blocks: a block for each, in rounds of as many as the device holds, or with lengths
  // on the device no more blocks than that, each of which looks for its sequences once.
  Choice whole() const {
    if (!adds_up(tiles_ * config_.block_n)) return {};
    const std::int64_t most = lengths_known_ ? core::kMaxGrid : slots_;
    const std::int64_t grid = std::min<std::int64_t>(row_blocks_, most);
    const auto rounds =
        static_cast<double>(core::ceil_div(std::max<std::int64_t>(row_blocks_, 1), slots_));
    return choice(Division(), 1, grid, ns(rounds, rounds));
  }

 private:
  // Whether a block of wide heads, which has one accumulator for its keys, may add up so many of a
  // row block (tile/accumulation_limits.h).
  bool adds_up(std::int64_t keys) const { return !is_wide_ || keys <= tile::kMostKeys; }
  // The blocks to which tiles are dealt evenly.
  std::int64_t blocks_of_parts() const {
    const std::int64_t least = is_wide_ ? 4 : 2;  // tiles of a block
    return std::clamp<std::int64_t>(core::ceil_div(row_blocks_ * tiles_, least), 1, slots_);
  }
  // The most keys of a row block that one of them may get, by work_partition.h.
  std::int64_t most_keys_dealt() const {
    const std::int64_t units = row_blocks_ * (tiles_ + fixed_overhead_tiles(config_.block_n));
    const std::int64_t dealt = core::ceil_div(units, blocks_of_parts());
    return std::min(tiles_, dealt + dealt / 15 + 1) * config_.block_n;
  }
  // Those of a block that cost products: with wide heads 16 rows that do not exist cost none.
  std::int64_t rows_of_block(const AttentionParams& p) const {
    if (!is_wide_) return config_.block_m;
    const std::int64_t rows = p.seqlen_q * (p.num_heads / p.num_heads_kv);
    return std::min<std::int64_t>(config_.block_m, core::ceil_div(rows, 16) * 16);
  }
  Choice choice(const Division& division, std::int64_t num_splits, std::int64_t grid,
                double ns) const {
    Choice choice;
    choice.variant = variant_;
    choice.division = division;
    choice.num_splits = num_splits;
    choice.grid = grid;
    choice.ns = ns;
    return choice;
  }

  double combine_ns() const { return kCombine + (lengths_known_ ? 0.0 : kCombineOfLengths); }

  // The time of a block with the keys of so many row blocks, which begins so many, in a grid of
  // that size or one that leaves no SM idle.
  double ns(double row_blocks, double begun,
            std::int64_t grid = std::numeric_limits<std::int64_t>::max()) const {
    const double least =
        std::max(memory_ns_, busy_ns_ / static_cast<double>(std::min(grid, num_sms_)));
    // Windows leave fewer tiles than there are blocks for; a block has at least one.
    const double keys =
        std::max(used_ * row_blocks * keys_, std::min<double>(config_.block_n, keys_));
    return times_.first + times_.next * std::max(used_ * begun - 1.0, 0.0) +
           std::max(keys * times_.per_key, least);
  }

  int variant_;
  TileConfig config_;
  Times times_;
  bool is_wide_;
  std::int64_t row_blocks_, heads_, tiles_, slots_, num_sms_;
  double used_, keys_, memory_ns_, busy_ns_;
  bool lengths_known_, one_sequence_, has_clusters_;
};

}  // namespace dlattn::decode
