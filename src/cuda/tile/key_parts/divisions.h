#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/problem/limits.h"
#include "core/util/ceil_div.h"
#include "cuda/tile/key_parts/shape.h"
#include "dlattn/forward.h"

// The ways to divide the keys of row blocks among thread blocks and the model of their times, as
// plain host code for the plans of the families that divide keys.
namespace dlattn::tile::key_parts {

// The keys of a part with batch_invariant. It is a constant, so that bits depend on nothing that a
// batch may change.
constexpr std::int64_t kInvariantSplit = 1024;

// How the keys of a row block are divided among thread blocks: not at all; into so many parts; into
// parts of so many keys; else evenly.
struct Division {
  bool whole = true;
  int num_splits = 0;
  std::int64_t split_size = 0;
};

// A way to run a problem, and the time that it is predicted to take. It is infinite for none.
struct Choice {
  Division division;
  std::int64_t num_splits = 1;  // of a row block, at most
  std::int64_t grid = 0;
  int cluster_size = 1;
  double ns = std::numeric_limits<double>::infinity();
};

// A family's thread blocks and the work that a problem is for them. Times are in nanoseconds.
struct BlockModel {
  int block_m = 0;
  int block_n = 0;
  std::int64_t resident = 1;     // blocks that an SM holds
  std::int64_t least_tiles = 2;  // of a block, where keys are divided evenly
  std::int64_t most_keys = std::numeric_limits<std::int64_t>::max();  // that a block adds up

  double first = 0.0;         // of a block: launch and first copies
  double next = 0.0;          // of each further row block, which begins with empty stages
  double per_key = 0.0;       // of a block, alone on its SM or beside another
  double combine = 0.0;       // of the kernel that adds up the parts
  double keys = 1.0;          // of a row block, on average
  double least_keys = 0.0;    // of a block, whatever it has
  double used = 1.0;          // the part of the row blocks that there is
  double least = 0.0;         // of all blocks together, however many: the keys' way from memory
  double least_of_sms = 0.0;  // of one SM that does the work of all; SMs share it
};

// How the row blocks of a problem are divided among a family's thread blocks, and what that takes.
class WorkPartition {
 public:
  WorkPartition(const AttentionParams& p, const DeviceInfo& device, const BlockModel& model)
      : model_(model),
        row_blocks_(num_row_blocks(p, model.block_m)),
        heads_(std::max<std::int64_t>(p.batch_size * p.num_heads_kv, 1)),
        tiles_(core::ceil_div(p.seqlen_k, model.block_n)),
        num_sms_(std::max(device.num_sms, 1)),
        slots_(model.resident * num_sms_),
        lengths_known_(host_knows_lengths(p)) {}

  bool lengths_known() const { return lengths_known_; }

  // The units as kernels count them, at most: tiles, and what it takes to begin (schedule.cuh).
  double most_units() const {
    return static_cast<double>(row_blocks_) *
           static_cast<double>(tiles_ + fixed_overhead_tiles(model_.block_n));
  }

  // Whole row blocks: a block for each, in rounds of as many as the device holds, or with lengths
  // on the device no more blocks than that, each of which looks for its sequences once.
  Choice whole() const {
    if (tiles_ * model_.block_n > model_.most_keys) return {};
    const std::int64_t most = lengths_known_ ? core::kMaxGrid : slots_;
    const auto rounds =
        static_cast<double>(core::ceil_div(std::max<std::int64_t>(row_blocks_, 1), slots_));
    return choice({}, 1, std::min(row_blocks_, most), ns(rounds, rounds));
  }

  // Keys are divided evenly, among as many blocks as the device holds.
  Choice in_parts() const {
    const std::int64_t grid = std::clamp<std::int64_t>(
        core::ceil_div(row_blocks_ * tiles_, model_.least_tiles), 1, slots_);
    const std::int64_t units = row_blocks_ * (tiles_ + fixed_overhead_tiles(model_.block_n));
    const std::int64_t share = core::ceil_div(units, grid);
    // By work_partition.h a block may get a little more than its share.
    if (std::min(tiles_, share + share / 15 + 1) * model_.block_n > model_.most_keys) return {};
    Division evenly;
    evenly.whole = false;
    const double row_blocks = static_cast<double>(row_blocks_) / static_cast<double>(grid);
    return choice(evenly, std::max<std::int64_t>(2, grid / heads_), grid,
                  ns(row_blocks, std::ceil(row_blocks)) + model_.combine);
  }

  // Parts of so many keys or of such a number, a block for each, in rounds.
  Choice split(const Division& division) const {
    const std::int64_t splits = parts_of(division), parts = row_blocks_ * splits;
    const std::int64_t each = division.split_size > 0
                                  ? division.split_size
                                  : core::ceil_div(tiles_, splits) * model_.block_n;
    if (std::min(each, tiles_ * model_.block_n) > model_.most_keys) return {};
    const std::int64_t grid = std::clamp<std::int64_t>(parts, 1, slots_);
    const auto rounds = static_cast<double>(core::ceil_div(parts, grid));
    return choice(division, splits, grid,
                  ns(rounds / static_cast<double>(splits), rounds) + model_.combine);
  }
  // The most parts that a row block can have.
  std::int64_t parts_of(const Division& division) const {
    const std::int64_t tiles = std::max<std::int64_t>(tiles_, 1);
    if (division.num_splits > 0) return std::min<std::int64_t>(division.num_splits, tiles);
    return core::ceil_div(tiles, division.split_size / model_.block_n);
  }

 protected:
  static Choice choice(const Division& division, std::int64_t num_splits, std::int64_t grid,
                       double ns) {
    Choice choice;
    choice.division = division;
    choice.num_splits = num_splits;
    choice.grid = grid;
    choice.ns = ns;
    return choice;
  }

  // The time of a block with the keys of so many row blocks, which begins so many, in a grid of
  // that size or one that leaves no SM idle.
  double ns(double row_blocks, double begun,
            std::int64_t grid = std::numeric_limits<std::int64_t>::max()) const {
    const double sms = static_cast<double>(std::min(grid, num_sms_));
    const double least = std::max(model_.least, model_.least_of_sms / sms);
    const double keys = std::max(model_.used * row_blocks * model_.keys, model_.least_keys);
    return model_.first + model_.next * std::max(model_.used * begun - 1.0, 0.0) +
           std::max(keys * model_.per_key, least);
  }

  BlockModel model_;
  std::int64_t row_blocks_, heads_, tiles_, num_sms_, slots_;
  bool lengths_known_;
};

// The launch that adds up the parts in the workspace, for the plan of a kernel that leaves them.
inline Launch combine_launch(const Plan& plan, std::int64_t grid) {
  Launch launch;
  launch.operation = Operation::kCombine;
  launch.kernel = plan.kernel;
  launch.dtype = plan.dtype;
  launch.head_dim_tile = plan.head_dim_tile;
  launch.variant = plan.variant;
  launch.variant_name = plan.variant_name;
  launch.block_m = 1;
  launch.num_warps = kCombineThreads / 32;
  launch.grid = grid;
  launch.smem_bytes = combine_smem_bytes();
  return launch;
}

}  // namespace dlattn::tile::key_parts
