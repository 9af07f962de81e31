#include "core/plan.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "core/concat.h"
#include "core/family.h"
#include "cuda/forward/cost.h"
#include "cuda/forward/decode/traits.h"
#include "cuda/tile/launch_shape.h"
#include "cuda/tile/span.h"

namespace dlattn::decode {
namespace {

using core::refuse;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Bytes a nanosecond that a device reads of its memory, by data sheet less a tenth. What it is not
// known for is taken for the slower of two.
double memory_rate(const DeviceInfo& device) {
  if (device.compute_major == 9) return 4000.0;
  if (device.compute_major >= 10) return device.num_sms >= 160 ? 1600.0 : 800.0;
  if (device.compute_minor == 0) return 1400.0;
  return device.num_sms < 60 ? 270.0 : 850.0;
}

// Of a tile shape, in nanoseconds. Measured on an H200.
struct Times {
  double first;    // of a block, launch and first copies
  double segment;  // of each further row block, which begins with empty stages
  double alone;    // per key, a block with an SM to itself
  double busy;     // per key and block, blocks that fill their SM
};
constexpr double kCombine = 2000.0;

Times times(int head_dim_tile, int variant, bool general) {
  const double columns = head_dim_tile / 128.0, rows = variant == kRows16 ? 1.0 : 2.0;
  const double modified = general ? 2.0 : 1.0;
  return {4000.0, 900.0, (1.5 + 2.5 * columns) * modified, (0.6 + 1.5 * columns * rows) * modified};
}

std::int64_t resident_blocks(const TileConfig& config, const DeviceInfo& device, int variant) {
  constexpr std::int64_t kReservedSmem = 1024;  // bytes per block that CUDA takes for itself
  const std::int64_t by_smem = device.smem_per_sm / (config.smem_bytes + kReservedSmem);
  return std::clamp<std::int64_t>(by_smem, 1, variant == kRows16 ? 2 : 1);
}

struct Choice {
  int variant;
  bool whole;
  std::int64_t grid;
  double ns;
};

// How a problem is dealt to the blocks of a shape, and what that takes.
class Dealt {
 public:
  Dealt(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile, int variant)
      : config_(tile_config(head_dim_tile, variant)),
        times_(
            times(head_dim_tile, variant, p.softcap != 0.0 || p.mask.data || p.alibi_slopes.data)) {
    const std::int64_t group = p.num_heads / p.num_heads_kv;
    of_head_ = ceil_div(p.seqlen_q * group, config_.block_m);
    row_blocks_ = of_head_ * p.num_heads_kv * p.batch_size;
    const cost::Walk walk = cost::walk(p, config_.block_m, static_cast<int>(group));
    // Every row block has the tiles that the last row sees.
    keys_ = std::max(std::min(cost::mean_seqlen_k(p), std::max(walk.mean, walk.longest)), 1.0);
    tiles_ = ceil_div(p.seqlen_k, config_.block_n);
    slots_ = resident_blocks(config_, device, variant) * device.num_sms;
    sms_ = std::max(device.num_sms, 1);
    const double bytes = keys_ * static_cast<double>(p.num_heads_kv * p.batch_size) *
                         static_cast<double>(p.head_dim + p.head_dim_v) * kElementBytes;
    memory_ns_ = bytes / memory_rate(device);
  }

  // Work units as kernels count them, at most.
  double most_units() const {
    return static_cast<double>(row_blocks_) * static_cast<double>(tiles_);
  }

  Choice in_parts(int variant) const {
    constexpr std::int64_t kLeastTiles = 2;  // of a block
    const std::int64_t units = row_blocks_ * tiles_;
    const std::int64_t grid = std::clamp<std::int64_t>(ceil_div(units, kLeastTiles), 1, slots_);
    return {variant, false, grid, ns(static_cast<double>(grid), 1.0) + kCombine};
  }
  Choice whole(int variant) const {
    const std::int64_t grid = std::clamp<std::int64_t>(row_blocks_, 1, slots_);
    const double rounds = std::ceil(static_cast<double>(row_blocks_) / static_cast<double>(grid));
    const double even = static_cast<double>(row_blocks_) / static_cast<double>(grid);
    return {variant, true, grid, ns(static_cast<double>(grid), rounds / std::max(even, 1e-9))};
  }

 private:
  // `uneven`: by how much the block with most keys has more than the mean.
  double ns(double grid, double uneven) const {
    const double keys = keys_ * static_cast<double>(row_blocks_);
    const double of_block = keys / grid * uneven;
    const double on_sm = std::ceil(grid / sms_);
    const double per_key = std::max(times_.alone, times_.busy * on_sm);
    const double segments = std::ceil(of_block / keys_) - 1.0;
    return times_.first + times_.segment * segments + std::max(of_block * per_key, memory_ns_);
  }

  TileConfig config_;
  Times times_;
  std::int64_t of_head_, row_blocks_, tiles_, slots_;
  double keys_, sms_, memory_ns_;
};

int requested_variant(const char* name) {
  for (int i = 0; i < kNumVariants; ++i) {
    if (name && std::string_view(name) == kVariantNames[i]) return i;
  }
  return -1;
}

std::string accepted_variants() {
  return "rows16, rows32";
}

bool accepts(const AttentionParams& p, const Plan& plan, std::string* why) {
  if (p.bias.data) return refuse(why, "does not implement bias");
  if (plan.copy_bytes < 16) {
    return refuse(why, "rows of q, k and v are aligned to ", plan.copy_bytes,
                  " bytes; accepted: 16");
  }
  // Each group of warps adds up its own.
  const std::int64_t most = shape_of(plan.head_dim_tile, kRows16).key_groups * tile::kMostKeys;
  if (p.seqlen_k > most) return refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", most);
  const std::int64_t rows = p.seqlen_q * (p.num_heads / p.num_heads_kv);
  if (rows > kMaxSeqlen) {
    return refuse(why, "seqlen_q x heads of a group is ", rows, "; accepted: up to ", kMaxSeqlen);
  }
  constexpr std::int64_t kMostPages = std::numeric_limits<std::int32_t>::max();
  if (p.page_table.data && p.page_size > kMostPages)
    return refuse(why, "page_size is ", p.page_size, "; accepted: up to ", kMostPages);
  if (p.page_table.data && p.num_pages > kMostPages)
    return refuse(why, "the pool has ", p.num_pages, " pages; accepted: up to ", kMostPages);
  return true;
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options& options,
                  Plan* plan, std::string* why) {
  const int tile = plan->head_dim_tile, requested = requested_variant(options.variant);
  if (options.variant && requested < 0)
    return refuse(why, "variant is ", options.variant, "; accepted: ", accepted_variants());
  if (requested >= 0 && !has_variant(tile, requested))
    return refuse(why, "variant ", options.variant, " has no instance for this head_dim");
  if (!accepts(p, *plan, why)) return false;
  // With batch_invariant a row block's keys are one thread block's, in the same order in any batch.
  AttentionParams large;
  const AttentionParams& counted = cost::counted(p, options.batch_invariant, &large);
  Choice best{requested, true, 0, std::numeric_limits<double>::infinity()};
  for (int variant = 0; variant < kNumVariants; ++variant) {
    if (!has_variant(tile, variant) || (requested >= 0 && variant != requested)) continue;
    if (tile_config(tile, variant).smem_bytes > device.max_smem_per_block) continue;
    const Dealt dealt(p, device, tile, variant);
    if (dealt.most_units() >= static_cast<double>(kMaxGrid)) continue;
    Choice choice = dealt.whole(variant);
    if (options.batch_invariant) {
      choice.ns = Dealt(counted, device, tile, variant).whole(variant).ns;
    } else if (options.allow_workspace) {
      const Choice parts = dealt.in_parts(variant);
      if (parts.ns < choice.ns) choice = parts;
    }
    if (choice.ns < best.ns) best = choice;
  }
  if (best.grid == 0)
    return refuse(why, "needs more shared memory than ", device.name,
                  " has, or has 2^31 tiles of keys");
  const TileConfig config = tile_config(tile, best.variant);
  plan->variant = best.variant;
  plan->variant_name = kVariantNames[best.variant];
  plan->packed_heads = static_cast<int>(p.num_heads / p.num_heads_kv);
  cost::set_tile(p, config, plan);
  const bool empty = p.batch_size == 0 || p.seqlen_q == 0 || (p.cu_seqlens_q && p.total_q == 0);
  plan->grid = empty ? 0 : best.grid;
  plan->predicted_ns = best.ns;
  if (best.whole) return true;
  plan->num_splits = static_cast<int>(std::max<std::int64_t>(
      2, best.grid / std::max<std::int64_t>(1, p.batch_size * p.num_heads_kv)));
  plan->workspace_bytes = workspace_map(p.batch_size, best.grid, config.block_m, tile).total;
  return p.batch_size * p.num_heads * p.seqlen_q <= kMaxGrid ||
         refuse(why, "batch_size x num_heads x seqlen_q is more than ", kMaxGrid);
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"decode", 0, 8, accepted_variants, plan_forward, true};

}  // namespace dlattn::decode
