#include "core/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/plan/family.h"
#include "core/problem/alignment.h"
#include "core/problem/limits.h"
#include "core/util/ceil_div.h"
#include "core/util/concat.h"
#include "cuda/forward/sm90_latent/boxes.h"
#include "cuda/plan/cost.h"
#include "cuda/tile/accumulation_limits.h"
#include "cuda/tile/key_parts/shape.h"

namespace dlattn::sm90_latent {
namespace {

using core::refuse;

constexpr std::int64_t kInvariantSplit = 1024;  // keys of a part with batch_invariant, as decode's

bool accepts_keys(const AttentionParams& p, std::string* why) {
  if (!is_latent(p)) return refuse(why, "does not read v unless it is the first columns of k");
  if (!is_wide(static_cast<int>(p.head_dim)))
    return refuse(why, "head_dim is ", p.head_dim, "; accepted: from 264");
  if (p.head_dim_v > kWideValues)
    return refuse(why, "head_dim of v is ", p.head_dim_v, "; accepted: up to ", kWideValues);
  if (p.cu_seqlens_k) return refuse(why, "does not implement cu_seqlens_k");
  if (p.leftpad_k) return refuse(why, "does not implement leftpad_k");
  if (p.page_table.data && p.page_size % 8 != 0)  // the swizzle has a period of 8 rows
    return refuse(why, "page_size is ", p.page_size, "; accepted: multiples of 8");
  const core::TensorSizes keys = core::key_sizes(p);
  const std::string pages =
      cuda::page_refusal("k", p.k.batch_stride, p.k.row_stride, keys.rows, keys.batch);
  if (!pages.empty()) return refuse(why, pages);
  const std::string tma = cuda::tma_refusal(key_boxes(p).box);
  return tma.empty() || refuse(why, tma);
}

bool accepts(const AttentionParams& p, const Plan& plan, std::string* why) {
  if (const char* const feature = core::score_feature(p))
    return refuse(why, "does not implement ", feature);
  if (!accepts_keys(p, why)) return false;
  if (plan.copy_bytes < 16) {
    return refuse(why, "rows of q, k and v are aligned to ", plan.copy_bytes,
                  " bytes; accepted: 16");
  }
  if (const int bytes = core::store_bytes(p); bytes < 16)
    return refuse(why, "rows of out are aligned to ", bytes, " bytes; accepted: 16");
  const std::int64_t rows = p.seqlen_q * (p.num_heads / p.num_heads_kv);
  if (rows <= core::kMaxSeqlen) return true;
  return refuse(why, "seqlen_q x heads of a group is ", rows, "; accepted: up to ",
                core::kMaxSeqlen);
}

// How the keys of a row block are divided, and the time that is predicted to take: infinite where a
// thread block would get more keys than it adds up.
struct Choice {
  int num_splits = 1;
  bool fixed_splits = false;
  std::int64_t split_size = 0;
  std::int64_t grid = 0;
  double ns = std::numeric_limits<double>::infinity();
};

// The ways to divide the keys among thread blocks, of which an SM holds one.
class WorkPartition {
 public:
  WorkPartition(const AttentionParams& p, const DeviceInfo& device)
      : row_blocks_(num_row_blocks(p, kBlockM)),
        heads_(std::max<std::int64_t>(p.batch_size * p.num_heads_kv, 1)),
        tiles_(core::ceil_div(p.seqlen_k, kBlockN)),
        slots_(std::max(device.num_sms, 1)),
        lengths_known_(!p.cu_seqlens_q && !p.seqused_k),
        keys_(std::max(cost::walk(p, kBlockM, static_cast<int>(p.num_heads / p.num_heads_kv)).mean,
                       1.0)),
        // V is read with K.
        memory_ns_(cost::keys_ns(p, device) * static_cast<double>(p.head_dim) /
                   static_cast<double>(p.head_dim + p.head_dim_v)) {}

  // The units as kernels count them, at most (schedule.cuh).
  double most_units() const {
    return static_cast<double>(row_blocks_) *
           static_cast<double>(tiles_ + fixed_overhead_tiles(kBlockN));
  }
  std::int64_t tiles() const { return tiles_; }
  bool lengths_known() const { return lengths_known_; }

  Choice whole() const {
    Choice choice;
    if (tiles_ * kBlockN > tile::kMostKeys) return choice;
    const std::int64_t most = lengths_known_ ? core::kMaxGrid : slots_;
    choice.grid = std::min(row_blocks_, most);
    const auto rounds =
        static_cast<double>(core::ceil_div(std::max<std::int64_t>(row_blocks_, 1), slots_));
    choice.ns = ns(rounds, rounds);
    return choice;
  }
  // Evenly, to all SMs.
  Choice in_parts() const {
    Choice choice;
    choice.grid = std::clamp<std::int64_t>(core::ceil_div(row_blocks_ * tiles_, 2), 1, slots_);
    const std::int64_t units = row_blocks_ * (tiles_ + fixed_overhead_tiles(kBlockN));
    const std::int64_t dealt = core::ceil_div(units, choice.grid);
    // By work_partition.h a block may get a little more than its share.
    if (std::min(tiles_, dealt + dealt / 15 + 1) * kBlockN > tile::kMostKeys) return choice;
    choice.num_splits = static_cast<int>(std::max<std::int64_t>(2, choice.grid / heads_));
    const double blocks = static_cast<double>(row_blocks_) / static_cast<double>(choice.grid);
    choice.ns = ns(blocks, std::ceil(blocks)) + kCombine;
    return choice;
  }
  // Parts of so many keys or of such a number, a block for each, in rounds.
  Choice split(int num_splits, std::int64_t split_size) const {
    Choice choice;
    choice.fixed_splits = num_splits > 0;
    choice.split_size = split_size;
    const std::int64_t all = std::max<std::int64_t>(tiles_, 1);
    const std::int64_t parts = num_splits > 0 ? std::min<std::int64_t>(num_splits, all)
                                              : core::ceil_div(tiles_, split_size / kBlockN);
    choice.num_splits = static_cast<int>(std::max<std::int64_t>(parts, 1));
    const std::int64_t each = num_splits > 0 ? core::ceil_div(tiles_, parts) * kBlockN : split_size;
    if (std::min(each, tiles_ * kBlockN) > tile::kMostKeys) return choice;
    choice.grid = std::clamp<std::int64_t>(row_blocks_ * choice.num_splits, 1, slots_);
    const auto rounds =
        static_cast<double>(core::ceil_div(row_blocks_ * choice.num_splits, choice.grid));
    choice.ns = ns(rounds / choice.num_splits, rounds) + kCombine;
    return choice;
  }

 private:
  // In nanoseconds, on an H200: of a block's begin, of each further row block's, of a key where its
  // columns are in L2, and of the kernel that adds up; and by how much keys come more slowly from
  // memory than it could give them.
  static constexpr double kFirst = 9000.0, kNext = 3000.0, kPerKey = 36.0, kCombine = 2500.0;
  static constexpr double kBehindMemory = 1.1;

  // The time of a block with the keys of so many row blocks, which begins so many.
  double ns(double row_blocks, double begun) const {
    return kFirst + kNext * std::max(begun - 1.0, 0.0) +
           std::max(row_blocks * keys_ * kPerKey, kBehindMemory * memory_ns_);
  }

  std::int64_t row_blocks_, heads_, tiles_, slots_;
  bool lengths_known_;
  double keys_, memory_ns_;
};

// The fastest way that the options admit.
Choice fastest(const WorkPartition& partition, const Options& options) {
  if (options.num_splits > 1) return partition.split(options.num_splits, 0);
  if (options.num_splits == 0 && options.split_size > 0)
    return partition.split(0, options.split_size);
  const bool invariant = options.batch_invariant && options.num_splits == 0;
  if (invariant && options.allow_workspace) return partition.split(0, kInvariantSplit);
  const Choice whole = partition.whole();
  if (invariant || options.num_splits == 1 || !options.allow_workspace) return whole;
  const Choice parts = partition.in_parts();
  // Where one sequence may be long and the others short, a block with its whole row block goes on
  // long after the others.
  if (partition.lengths_known() && whole.ns <= parts.ns) return whole;
  constexpr double kNone = std::numeric_limits<double>::infinity();
  return parts.ns < kNone ? parts : partition.split(0, tile::kMostKeys);
}

// The launch that adds up the parts in the workspace.
Launch combine_launch(const AttentionParams& p, const Plan& plan) {
  Launch launch;
  launch.operation = Operation::kCombine;
  launch.kernel = plan.kernel;
  launch.dtype = plan.dtype;
  launch.head_dim_tile = plan.head_dim_tile;
  launch.block_m = 1;
  launch.num_warps = kCombineThreads / 32;
  const CombineGrid grid = combine_grid(p, plan);
  launch.grid = grid.row_blocks * grid.slices;
  launch.smem_bytes = combine_smem_bytes();
  return launch;
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options& options,
                  Plan* plan, std::string* why) {
  const int tile = plan->head_dim_tile;
  if (!device.arch_specific_code)
    return refuse(why, "needs code for 90a, which this build does not have");
  // Latents of other strides, and packed ones, would get other bits.
  if (options.batch_invariant && options.kernel == core::kAuto)
    return refuse(why, "does not run with batch_invariant unless it is named");
  if (!accepts(p, *plan, why)) return false;
  const WorkPartition partition(p, device);
  const Choice choice = fastest(partition, options);
  if (partition.most_units() >= static_cast<double>(core::kMaxGrid))
    return refuse(why, "has 2^31 tiles of keys");
  if (choice.ns == std::numeric_limits<double>::infinity())
    return refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", tile::kMostKeys,
                  " in a part");
  plan->packed_heads = static_cast<int>(p.num_heads / p.num_heads_kv);
  cost::set_tile(p, tile_config(tile), plan);
  const bool empty = p.batch_size == 0 || p.seqlen_q == 0 || (p.cu_seqlens_q && p.total_q == 0);
  plan->grid = empty ? 0 : choice.grid;
  plan->predicted_ns = choice.ns;
  plan->num_splits = choice.num_splits;
  plan->fixed_splits = options.num_splits > 0;
  plan->split_size = options.split_size > 0 ? options.split_size : choice.split_size;
  if (choice.num_splits == 1) return true;
  plan->workspace_bytes = workspace_map(p.batch_size, num_parts(p, *plan), kBlockM, tile).total;
  plan->after[plan->num_after++] = combine_launch(p, *plan);
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"sm90_latent", 90, 8, nullptr, plan_forward, true};

}  // namespace dlattn::sm90_latent
