#include "core/plan/plan.h"

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

#include "core/plan/family.h"
#include "core/problem/alignment.h"
#include "core/problem/limits.h"
#include "core/util/concat.h"
#include "cuda/forward/sm90_latent/boxes.h"
#include "cuda/plan/cost.h"
#include "cuda/plan/tensor_refusal.h"
#include "cuda/tile/accumulation_limits.h"
#include "cuda/tile/key_parts/divisions.h"

namespace dlattn::sm90_latent {
namespace {

using core::refuse;

std::int64_t rows_of(const AttentionParams& p) {
  return p.seqlen_q * (p.num_heads / p.num_heads_kv);
}

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
  if (rows_of(p) <= core::kMaxSeqlen) return true;
  return refuse(why, "seqlen_q x heads of a group is ", rows_of(p), "; accepted: up to ",
                core::kMaxSeqlen);
}

std::string accepted_variants() {
  return "rows16, rows32, rows64";
}

std::string request_of(const Plan& plan) {
  return plan.variant_name;
}

int requested_variant(const char* name) {
  for (int i = 0; i < kNumVariants; ++i) {
    if (name && std::string_view(name) == kVariantNames[i]) return i;
  }
  return -1;
}

// The narrowest that has all rows. That of 64 has any, of 16 bits: with batch_invariant, where
// numbers of queries must not matter, it is taken.
bool choose_variant(const AttentionParams& p, const Options& options, int* variant,
                    std::string* why) {
  const int requested = requested_variant(options.variant);
  if (options.variant && requested < 0)
    return refuse(why, "variant is ", options.variant, "; accepted: ", accepted_variants());
  const bool bytes = key_bytes(p) == 1;
  const int last = bytes ? kRows32 : kRows64;
  if (bytes && options.batch_invariant)
    return refuse(why, "does not run with batch_invariant over keys of 8 bits");
  if (requested > last)
    return refuse(why, "variant ", options.variant, " does not read keys of 8 bits");
  *variant = requested >= 0 ? requested : kRows16;
  while (requested < 0 && *variant < last &&
         (rows_of(p) > sm90_latent::rows_of(*variant) || options.batch_invariant))
    ++*variant;
  if (*variant == kRows64 || rows_of(p) <= sm90_latent::rows_of(*variant)) return true;
  return refuse(why, "seqlen_q x heads of a group is ", rows_of(p), "; accepted by variant ",
                kVariantNames[*variant], ": up to ", sm90_latent::rows_of(*variant));
}

// How many row blocks a cluster has side by side.
int side_by_side(const AttentionParams& p, const DeviceInfo& device) {
  return are_side_by_side(p) && device.num_sms > 1 ? 2 : 1;
}

// A block, of which an SM holds one, or a cluster of them, and what a problem takes on it. Times
// are an H200's.
BlockModel block_model(const AttentionParams& p, const DeviceInfo& device, int side_by_side) {
  // Keys come more slowly from memory than it could give them.
  constexpr double kBehindMemory = 1.1;
  BlockModel model;
  model.block_m = kBlockM * side_by_side;
  model.block_n = kBlockN;
  model.most_keys = tile::kMostKeys;
  model.first = 9000.0;
  model.next = 3000.0;
  model.per_key = 36.0;  // where its columns are in L2
  if (key_bytes(p) == 1) model.per_key = rows_of(p) <= sm90_latent::rows_of(kRows16) ? 27.0 : 43.0;
  model.combine = 2500.0;
  const int heads = static_cast<int>(p.num_heads / p.num_heads_kv);
  model.keys = std::max(cost::walk(p, model.block_m, heads).mean, 1.0);
  // V is read with K.
  model.least = kBehindMemory * cost::keys_ns(p, device) * static_cast<double>(p.head_dim) /
                static_cast<double>(p.head_dim + p.head_dim_v);
  return model;
}

// The fastest way that the options admit.
Choice fastest(const WorkPartition& partition, const Options& options) {
  if (options.num_splits > 1) return partition.split({false, options.num_splits});
  if (options.num_splits == 0 && options.split_size > 0)
    return partition.split({false, 0, options.split_size});
  const bool invariant = options.batch_invariant && options.num_splits == 0;
  if (invariant && options.allow_workspace) return partition.split({false, 0, kInvariantSplit});
  const Choice whole = partition.whole();
  if (invariant || options.num_splits == 1 || !options.allow_workspace) return whole;
  const Choice parts = partition.in_parts();
  // Where one sequence may be long and the others short, a block with its whole row block goes on
  // long after the others.
  if (partition.lengths_known() && whole.ns <= parts.ns) return whole;
  constexpr double kNone = std::numeric_limits<double>::infinity();
  return parts.ns < kNone ? parts : partition.split({false, 0, tile::kMostKeys});
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options& options,
                  Plan* plan, std::string* why) {
  const int tile = plan->head_dim_tile;
  int variant = kRows64;
  if (!device.arch_specific_code)
    return refuse(why, "needs code for 90a, which this build does not have");
  if (!accepts(p, *plan, why) || !choose_variant(p, options, &variant, why)) return false;
  const int side_by_side = sm90_latent::side_by_side(p, device);
  DeviceInfo clusters = device;
  clusters.num_sms /= side_by_side;
  const WorkPartition partition(p, clusters, block_model(p, device, side_by_side));
  const Choice choice = fastest(partition, options);
  if (partition.most_units() >= static_cast<double>(core::kMaxGrid))
    return refuse(why, "has 2^31 tiles of keys");
  if (choice.ns == std::numeric_limits<double>::infinity())
    return refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", tile::kMostKeys,
                  " in a part");
  plan->packed_heads = static_cast<int>(p.num_heads / p.num_heads_kv);
  cost::set_tile(p, tile_config(tile, variant, key_bytes(p)), plan);
  plan->variant = variant;
  plan->variant_name = kVariantNames[variant];
  const bool empty = p.batch_size == 0 || p.seqlen_q == 0 || (p.cu_seqlens_q && p.total_q == 0);
  plan->grid = empty ? 0 : choice.grid * side_by_side;
  const Division& division = choice.division;
  const bool evenly = !division.whole && division.num_splits == 0 && division.split_size == 0;
  plan->cluster_size = side_by_side == 2 || (evenly && plan->grid % 2 == 0) ? 2 : 1;
  plan->predicted_ns = choice.ns;
  plan->num_splits = static_cast<int>(choice.num_splits);
  plan->fixed_splits = options.num_splits > 0;
  plan->split_size = options.split_size > 0 ? options.split_size : choice.division.split_size;
  if (choice.num_splits == 1) return true;
  plan->workspace_bytes = workspace_map(p.batch_size, num_parts(p, *plan), kBlockM, tile).total;
  const CombineGrid grid = combine_grid(p, *plan);
  plan->after[plan->num_after++] = combine_launch(*plan, grid.row_blocks * grid.slices);
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"sm90_latent", 90,   8,          accepted_variants,
                                     plan_forward,  true, request_of, cost::varies_with_form};

}  // namespace dlattn::sm90_latent
