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

// Of a tile shape, in nanoseconds. Measured on an H200.
struct Times {
  double first;    // of a block, launch and first copies
  double next;     // of each further row block, which begins with empty stages
  double per_key;  // of a block, alone on its SM or beside another
};
constexpr double kCombine = 2200.0;

Times times(const AttentionParams& p, int head_dim_tile, int variant) {
  const bool modified = p.softcap != 0.0 || p.mask.data || p.alibi_slopes.data;
  const double of_rows = variant == kRows16 ? 11.0 : 12.0;
  return {3300.0, 900.0, of_rows * head_dim_tile / 128.0 * (modified ? 2.0 : 1.0)};
}

// How many blocks an SM holds; registers leave room for two of 16 rows, and one of 32.
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
      : variant_(variant),
        config_(tile_config(head_dim_tile, variant)),
        times_(times(p, head_dim_tile, variant)) {
    const std::int64_t group = p.num_heads / p.num_heads_kv;
    const std::int64_t of_head = ceil_div(p.seqlen_q * group, config_.block_m);
    row_blocks_ = of_head * p.num_heads_kv * p.batch_size;
    // Every row block has the tiles that a row of its sequence sees.
    const cost::Walk walk = cost::walk(p, config_.block_m, static_cast<int>(group));
    keys_ = std::max(std::min(cost::mean_seqlen_k(p), walk.longest), 1.0);
    tiles_ = ceil_div(p.seqlen_k, config_.block_n);
    slots_ = resident_blocks(config_, device, variant) * std::max(device.num_sms, 1);
    // Every row block reads its keys, all but the first from L2: some 40 bytes a nanosecond and SM.
    constexpr double kL2Rate = 40.0;
    const double reads =
        keys_ * static_cast<double>(row_blocks_ * (p.head_dim + p.head_dim_v)) * kElementBytes;
    // Tensor cores are fed by too few warps to be more than a third busy, which is enough for
    // memory.
    constexpr double kBusy = 0.35;
    const double products =
        4.0 * keys_ * head_dim_tile * static_cast<double>(row_blocks_ * config_.block_m);
    const double sms = std::max(device.num_sms, 1);
    least_ns_ = std::max({cost::keys_ns(p, device), reads / (kL2Rate * sms),
                          products / (kBusy * cost::tensor_rate(device) * sms)});
  }

  // Units as kernels count them, at most.
  double most_units() const {
    return static_cast<double>(row_blocks_) * static_cast<double>(tiles_);
  }

  // Keys are dealt evenly, to as many blocks as the device holds.
  Choice in_parts() const {
    constexpr std::int64_t kLeastTiles = 2;  // of a block
    const std::int64_t units = row_blocks_ * tiles_;
    const std::int64_t grid = std::clamp<std::int64_t>(ceil_div(units, kLeastTiles), 1, slots_);
    const double row_blocks = static_cast<double>(row_blocks_) / static_cast<double>(grid);
    return {variant_, false, grid, ns(row_blocks, std::ceil(row_blocks)) + kCombine};
  }
  // A block for each row block, in rounds of as many as the device holds.
  Choice whole() const {
    const std::int64_t grid = std::min<std::int64_t>(row_blocks_, kMaxGrid);
    const auto rounds = static_cast<double>(ceil_div(std::max<std::int64_t>(grid, 1), slots_));
    return {variant_, true, grid, ns(rounds, rounds)};
  }

 private:
  // Of a block with the keys of so many row blocks, which begins so many.
  double ns(double row_blocks, double begun) const {
    return times_.first + times_.next * std::max(begun - 1.0, 0.0) +
           std::max(row_blocks * keys_ * times_.per_key, least_ns_);
  }

  int variant_;
  TileConfig config_;
  Times times_;
  std::int64_t row_blocks_, tiles_, slots_;
  double keys_, least_ns_;
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

bool accepts(const AttentionParams& p, const Options& options, const Plan& plan, std::string* why) {
  if (p.bias.data) return refuse(why, "does not implement bias");
  if (plan.copy_bytes < 16) {
    return refuse(why, "rows of q, k and v are aligned to ", plan.copy_bytes,
                  " bytes; accepted: 16");
  }
  // Each group of warps adds up its own.
  const std::int64_t most = shape_of(plan.head_dim_tile, kRows16).key_groups * tile::kMostKeys;
  if (p.seqlen_k > most) return refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", most);
  const std::int64_t rows = p.seqlen_q * (p.num_heads / p.num_heads_kv);
  // Where there are more, it was not measured.
  constexpr std::int64_t kFewRows = 64;
  if (options.kernel == core::kAuto && !is_cache(p) && rows > kFewRows)
    return refuse(why, "is for few queries");
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
  if (!accepts(p, options, *plan, why)) return false;
  // With batch_invariant a row block's keys are one thread block's, in the same order in any batch.
  AttentionParams large;
  const AttentionParams& counted = cost::counted(p, options.batch_invariant, &large);
  Choice best{-1, true, 0, std::numeric_limits<double>::infinity()};
  for (int variant = 0; variant < kNumVariants; ++variant) {
    if (!has_variant(tile, variant) || (requested >= 0 && variant != requested)) continue;
    if (tile_config(tile, variant).smem_bytes > device.max_smem_per_block) continue;
    const Dealt dealt(p, device, tile, variant);
    if (dealt.most_units() >= static_cast<double>(kMaxGrid)) continue;
    Choice choice = dealt.whole();
    if (options.batch_invariant) {
      choice.ns = Dealt(counted, device, tile, variant).whole().ns;
    } else if (options.allow_workspace) {
      const Choice parts = dealt.in_parts();
      if (parts.ns < choice.ns) choice = parts;
    }
    if (choice.ns < best.ns) best = choice;
  }
  if (best.variant < 0)
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
