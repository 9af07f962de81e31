#include "core/plan/plan.h"

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

#include "core/plan/family.h"
#include "core/problem/limits.h"
#include "core/util/concat.h"
#include "cuda/forward/decode/choices.h"
#include "cuda/plan/cost.h"
#include "cuda/tile/accumulation_limits.h"
#include "cuda/tile/key_parts/divisions.h"

namespace dlattn::decode {
namespace {

using core::refuse;

int requested_variant(const char* name) {
  for (int i = 0; i < kNumVariants; ++i) {
    if (name && std::string_view(name) == kVariantNames[i]) return i;
  }
  return -1;
}

std::string accepted_variants() {
  return "rows16, rows32";
}

std::string request_of(const Plan& plan) {
  return plan.variant_name;
}

// Plan::margin of many rows of queries, as the model was fitted to few. So much less than another
// kernel's its prediction must be for this one to have been the faster one on an H200
// (research/steps/h200-choices-blocks.json); where nobody has measured, others are taken if any
// serves.
double margin(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile) {
  constexpr std::int64_t kFewRows = 64, kFewModifiedRows = 1024;  // of a KV head
  constexpr double kOfModified = 1.2, kMeasured = 1.5;
  constexpr double kUnmeasured = std::numeric_limits<double>::infinity();
  constexpr std::int64_t kMostKeys = 8192;
  const std::int64_t rows = p.seqlen_q * (p.num_heads / p.num_heads_kv);
  if (is_cache(p)) return 1.0;
  if (is_wide(head_dim_tile)) return kUnmeasured;
  if (rows <= kFewRows) return 1.0;
  if (device.compute_major != 9) return kUnmeasured;
  const bool all_keys = p.window_left < 0 && p.window_right < 0 && p.causal != Causal::kTopLeft;
  if (is_general(p) && head_dim_tile <= 128 && rows <= kFewModifiedRows)
    return all_keys ? kOfModified : 1.0;
  const bool fixed_length = !p.cu_seqlens_q && !p.cu_seqlens_k;
  const bool is_measured =
      all_keys && fixed_length && p.seqlen_k <= kMostKeys && head_dim_tile >= 64;
  return is_measured ? kMeasured : kUnmeasured;
}

bool accepts(const AttentionParams& p, const Plan& plan, std::string* why) {
  if (p.bias.data) return refuse(why, "does not implement bias");
  if (plan.copy_bytes < 16) {
    return refuse(why, "rows of q, k and v are aligned to ", plan.copy_bytes,
                  " bytes; accepted: 16");
  }
  if (is_wide(plan.head_dim_tile)) {
    if (p.head_dim_v > kWideValues)
      return refuse(why, "head_dim of v is ", p.head_dim_v, "; accepted: up to ", kWideValues);
  } else {
    // Each group of warps adds up its own.
    const Shape shape = shape_of(plan.head_dim_tile, kRows16, key_bytes(p));
    const std::int64_t most = shape.key_groups * tile::kMostKeys;
    if (p.seqlen_k > most)
      return refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", most);
  }
  const std::int64_t rows = p.seqlen_q * (p.num_heads / p.num_heads_kv);
  if (rows > core::kMaxSeqlen) {
    return refuse(why, "seqlen_q x heads of a group is ", rows, "; accepted: up to ",
                  core::kMaxSeqlen);
  }
  constexpr std::int64_t kMostPages = std::numeric_limits<std::int32_t>::max();
  if (p.page_table.data && p.page_size > kMostPages)
    return refuse(why, "page_size is ", p.page_size, "; accepted: up to ", kMostPages);
  if (p.page_table.data && p.num_pages > kMostPages)
    return refuse(why, "the pool has ", p.num_pages, " pages; accepted: up to ", kMostPages);
  return true;
}

Division asked_division(const Options& options) {
  if (options.num_splits > 0)
    return {options.num_splits == 1, options.num_splits == 1 ? 0 : options.num_splits};
  if (options.split_size > 0) return {false, 0, options.split_size};
  if (options.batch_invariant && options.allow_workspace) return {false, 0, kInvariantSplit};
  return {};
}

// The fastest of the ways to divide the keys on one shape that the options admit.
Choice fastest(const ClusterPartition& partition, const Options& options) {
  Choice best;
  const auto consider = [&best](const Choice& choice) {
    if (choice.ns < best.ns) best = choice;
  };
  const Division asked = asked_division(options);
  const bool invariant = options.batch_invariant || asked.split_size > 0;
  if (!asked.whole && partition.parts_of(asked) > 1) {
    const bool clusters = !invariant && partition.has_clusters(asked.num_splits);
    // Without clusters a plan says what workspace it needs, though there is none.
    if (options.allow_workspace || !clusters) consider(partition.split(asked));
    if (clusters) consider(partition.in_clusters(asked.num_splits));
    return best;
  }
  if (invariant || options.num_splits > 0) {
    consider(partition.whole());  // a row block that is one part has the same bits either way
    best.division.split_size = asked.split_size;
    return best;
  }
  if (!options.allow_workspace || !partition.may_be_uneven()) consider(partition.whole());
  if (options.allow_workspace) consider(partition.in_parts());
  for (const int size : kClusterSizes) {
    if (partition.may_be_clusters(size)) consider(partition.in_clusters(size));
  }
  // Where a thread block may get more keys than it adds up.
  const bool none = best.ns == std::numeric_limits<double>::infinity();
  if (none && options.allow_workspace) consider(partition.split({false, 0, tile::kMostKeys}));
  return best;
}

// The thread blocks that add up `pieces` of rows.
std::int64_t combine_grid(std::int64_t pieces, const DeviceInfo& device, int head_dim_tile) {
  const std::int64_t sms = std::max(device.num_sms, 1), room = kCombineBlocks * sms;
  const std::int64_t side_by_side = rows_side_by_side(head_dim_tile);
  // Few rows may have many parts each, many have few.
  constexpr std::int64_t kOfSM = 4;
  const std::int64_t of_one = core::ceil_div(pieces, combine_blocks(head_dim_tile) * side_by_side);
  if (side_by_side > 1 && pieces > kOfSM * sms) return std::min(of_one, room);
  // No more thread blocks than there is room for at once: others would begin late.
  const std::int64_t rounds = std::max<std::int64_t>(core::ceil_div(pieces, room), 1);
  return core::ceil_div(pieces, rounds);
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options& options,
                  Plan* plan, std::string* why) {
  const int tile = plan->head_dim_tile, requested = requested_variant(options.variant);
  if (options.variant && requested < 0)
    return refuse(why, "variant is ", options.variant, "; accepted: ", accepted_variants());
  if (requested >= 0 && !has_variant(tile, requested))
    return refuse(why, "variant ", options.variant, " has no instance for this head_dim");
  if (!accepts(p, *plan, why)) return false;
  Choice best;
  int best_variant = 0;
  for (int variant = 0; variant < kNumVariants; ++variant) {
    if (!has_variant(tile, variant) || (requested >= 0 && variant != requested)) continue;
    if (tile_config(tile, variant, key_bytes(p)).smem_bytes > device.max_smem_per_block) continue;
    const ClusterPartition partition(p, device, tile, variant);
    if (partition.most_units() >= static_cast<double>(core::kMaxGrid)) continue;
    const Choice choice = fastest(partition, options);
    if (choice.ns < best.ns) {
      best = choice;
      best_variant = variant;
    }
  }
  const bool none = best.ns == std::numeric_limits<double>::infinity();
  if (none && is_wide(tile) && p.seqlen_k > tile::kMostKeys)
    return refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", tile::kMostKeys,
                  " in a part");
  if (none)
    return refuse(why, "needs more shared memory than ", device.name,
                  " has, or has 2^31 tiles of keys");
  const TileConfig config = tile_config(tile, best_variant, key_bytes(p));
  plan->variant = best_variant;
  plan->variant_name = kVariantNames[best_variant];
  plan->packed_heads = static_cast<int>(p.num_heads / p.num_heads_kv);
  cost::set_tile(p, config, plan);
  const bool empty = p.batch_size == 0 || p.seqlen_q == 0 || (p.cu_seqlens_q && p.total_q == 0);
  plan->grid = empty ? 0 : best.grid;
  plan->cluster_size = best.cluster_size;
  plan->predicted_ns = best.ns;
  plan->margin = margin(p, device, tile);
  plan->fixed_splits = options.num_splits > 0;
  plan->split_size = best.division.split_size;
  plan->num_splits = static_cast<int>(best.num_splits);
  if (best.division.whole || best.cluster_size > 1) return true;
  plan->workspace_bytes =
      workspace_map(p.batch_size, num_parts(p, *plan), config.block_m, tile).total;
  const std::int64_t rows = rows_to_combine(p, tile);
  if (rows > core::kMaxGrid)
    return refuse(why, "batch_size x num_heads x seqlen_q is more than ",
                  core::kMaxGrid / combine_blocks(tile));
  plan->after[plan->num_after++] = combine_launch(*plan, combine_grid(rows, device, tile));
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"decode",     0,    8,         accepted_variants,
                                     plan_forward, true, request_of};

}  // namespace dlattn::decode
