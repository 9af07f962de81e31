#include "core/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "core/plan/family.h"
#include "core/problem/limits.h"
#include "core/problem/positions.h"
#include "core/util/concat.h"
#include "cuda/forward/sm90/boxes.h"
#include "cuda/forward/sm90/head_order.h"
#include "cuda/forward/sm90/score_params.h"
#include "cuda/plan/cost.h"
#include "cuda/plan/persistent_grid.h"
#include "cuda/plan/tensor_box.h"
#include "cuda/plan/tensor_refusal.h"
#include "cuda/tile/accumulation_limits.h"

namespace dlattn::sm90 {
namespace {

using core::refuse;

// The variant of a name; nullopt if there is none.
std::optional<Variant> variant_named(std::string_view name) {
  for (const Variant variant :
       {Variant::kTall, Variant::kComputed, Variant::kLoaded, Variant::kShort, Variant::kPairs}) {
    if (name == name_of(variant)) return variant;
  }
  return std::nullopt;
}

std::string accepted_variants() {
  return "tall, softcap_alibi, bias_mask, short, pairs";
}

// A problem's own score modifications choose between the tall blocks' variants.
std::string request_of(const Plan& plan) {
  const auto variant = static_cast<Variant>(plan.variant);
  const bool is_tall = variant != Variant::kShort && variant != Variant::kPairs;
  return name_of(is_tall ? Variant::kTall : variant);
}

// Names the first feature of a problem that the family takes only with sequences of one length;
// null if there is none.
const char* fixed_length_feature(const AttentionParams& p) {
  if (!p.cu_seqlens_q) return nullptr;
  if (p.mask.data) return "mask with cu_seqlens_q";
  return p.bias.data ? "bias with cu_seqlens_q" : nullptr;
}

// Why the family does not read the cache that a problem's keys lie in; empty if it does, or if
// there is none.
std::string cache_refusal(const AttentionParams& p, int head_dim_tile) {
  if (!is_cache(p)) return {};
  if (const char* feature = core::score_feature(p))
    return core::concat("does not implement ", feature, " with keys in a cache");
  if (!reads_caches(head_dim_tile, Variant::kTall))
    return "has no instance for this head_dim with keys in a cache";
  if (p.leftpad_k) return "does not implement leftpad_k";
  if (p.page_table.data && p.page_size % 8 != 0)  // the swizzle has a period of 8 rows
    return core::concat("page_size is ", p.page_size, "; accepted: multiples of 8");
  const core::TensorSizes keys = core::key_sizes(p);
  const auto refusal = [&](const char* name, const TensorView& x) {
    return cuda::page_refusal(name, x.batch_stride, x.row_stride, keys.rows, keys.batch);
  };
  const std::string of_k = refusal("k", p.k);
  return of_k.empty() ? refusal("v", p.v) : of_k;
}

// The factor of the time of a key in a cache, by the boxes that its pages take; an estimate.
double page_factor(const AttentionParams& p, int block_n) {
  if (!is_cache(p)) return 1.0;
  const int rows = cuda::page_box_rows(p, block_n);
  return rows >= 64 ? 1.02 : rows >= 32 ? 1.05 : rows >= 16 ? 1.12 : 1.5;
}

// Whether TMA can be told of a problem's tensors.
bool accepts_tensors(const AttentionParams& p, Variant variant, std::string* why) {
  const int tile = static_cast<int>(std::max(p.head_dim, p.head_dim_v));
  const TensorBoxes boxes = tensor_boxes(p, tile, variant);
  for (const cuda::TensorBox* box :
       {&boxes.q, &boxes.k, &boxes.v, &boxes.out, &boxes.bias, &boxes.mask}) {
    const std::string tma_refusal = cuda::tma_refusal(*box);
    if (!tma_refusal.empty()) return refuse(why, tma_refusal);
  }
  return true;
}

// Whether the kernels with score modification can take a problem's.
bool accepts_scores(const AttentionParams& p, std::string* why) {
  const struct {
    const char* name;
    const void* data;
    std::int64_t col_stride;
  } bias_mask[] = {{"bias", p.bias.data, p.bias.col_stride},
                   {"mask", p.mask.data, p.mask.col_stride}};
  for (const auto& x : bias_mask) {
    if (x.data && p.seqlen_k > 1 && x.col_stride != 1) {
      return refuse(why, x.name, " has a column stride of ", x.col_stride,
                    " elements; accepted: 1");
    }
  }
  const double cap = p.softcap / p.softmax_scale;
  if (p.softcap != 0.0 && !(cap >= kLeastCap && cap <= kLargestCap)) {
    return refuse(why, "softcap / softmax_scale is ", cap, "; accepted: ", kLeastCap, " to ",
                  kLargestCap);
  }
  if (p.alibi_slopes.data && p.softmax_scale < kLeastScale) {
    return refuse(why, "softmax_scale is ", p.softmax_scale, "; accepted with alibi_slopes: from ",
                  kLeastScale);
  }
  return true;
}

using Speed = cost::OnePerSmSpeed;

// Measured on an H200 (research/steps/h200-choices.json; of plain scores up to head_dim 128,
// h200-choices-blocks.json).
Speed speed(const AttentionParams& p, int head_dim_tile, Variant variant) {
  const ScoreMod score_mod = score_mod_of(p);
  if (p.softcap != 0.0 && score_mod != ScoreMod::kBiasMask) {
    if (head_dim_tile <= 64) return {5500, 6500, 24.0, 13.0};
    if (head_dim_tile <= 96) return {6000, 7000, 24.0, 12.0};
    if (head_dim_tile <= 128) return {6500, 8000, 27.0, 13.0};
    return head_dim_tile <= 192 ? Speed{8000, 10000, 19.5, 10.0} : Speed{9000, 13000, 23.5, 14.0};
  }
  if (score_mod == ScoreMod::kComputed) {
    if (head_dim_tile <= 64) return {4500, 5000, 12.1, 7.8};
    if (head_dim_tile <= 96) return {5500, 5900, 15.4, 7.8};
    if (head_dim_tile <= 128) return {5500, 6700, 17.5, 11.2};
    return head_dim_tile <= 192 ? Speed{4400, 7600, 17.1, 7.8} : Speed{5600, 11200, 19.8, 14.0};
  }
  if (score_mod == ScoreMod::kBiasMask) {
    if (head_dim_tile <= 64) return {4100, 4100, 18.5, 14.3};
    if (head_dim_tile <= 96) return {4300, 5200, 15.8, 10.0};
    if (head_dim_tile <= 128) return {4500, 5000, 17.9, 13.7};
    return head_dim_tile <= 192 ? Speed{5000, 6500, 21.0, 10.1} : Speed{6000, 12300, 23.2, 16.6};
  }
  if (variant == Variant::kShort) {
    if (head_dim_tile <= 64) return {3800, 4370, 7.05, 4.8};
    return head_dim_tile <= 96 ? Speed{4050, 4950, 8.7, 8.2} : Speed{4200, 4650, 10.4, 7.9};
  }
  if (head_dim_tile <= 64) return {3700, 4340, 13.0, 8.5};
  if (head_dim_tile <= 96) return {4100, 5050, 14.0, 8.5};
  if (head_dim_tile <= 128) return {4300, 5130, 15.0, 10.0};
  if (head_dim_tile <= 192 && head_dim_v_tile(head_dim_tile, p.head_dim_v) <= 128)
    return {4200, 7300, 11.2, 11.2};
  if (head_dim_tile <= 192) return {6000, 9900, 13.3, 13.3};
  return variant == Variant::kPairs ? Speed{5800, 9400, 18.5, 12.4} : Speed{5000, 7800, 19.6, 12.4};
}

// Whether set-up and copies of a work tile take longer than its products, so that blocks that stay
// for several are faster however few these are.
bool is_shortest_walk(const AttentionParams& p, const TileShape& shape) {
  constexpr std::int64_t kKeys = 256;
  return shape.query_stages > 1 && !p.cu_seqlens_q && p.causal == Causal::kNone &&
         cuda::longest_walk(p, block_m(shape)) <= kKeys;
}

// By what part of how far the longest walk exceeds the mean the last SM ends later; the same fit.
double tail(const AttentionParams& p, int head_dim_tile, Variant variant) {
  if (score_mod_of(p) != ScoreMod::kNone) return head_dim_tile <= 64 ? 0.8 : 0.25;
  if (variant == Variant::kShort) return head_dim_tile <= 64 ? 0.15 : 0.75;
  if (head_dim_tile > 128) return 0.25;
  return head_dim_tile > 96 ? 0.74 : 0.35;
}

double predicted_ns(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                    Variant variant) {
  const TileShape shape = tile_shape(p, head_dim_tile, variant);
  Speed s = speed(p, head_dim_tile, variant);
  cost::Walk walk = cost::walk(p, block_m(shape), 1);
  // Tiles of keys are computed whole.
  const bool alike = walk.mean == walk.longest;
  walk.longest = std::ceil(walk.longest / shape.block_n) * shape.block_n;
  if (alike) walk.mean = walk.longest;
  const double per_key = page_factor(p, shape.block_n) *
                         s.of_key(cost::mean_seqlen_q(p), block_m(shape), kWarpgroupRows);
  // Persistent blocks hide a part of what lies between two tiles, where walks are short.
  constexpr double kManyRounds = 7, kShortWalk = 1024;
  const bool persistent = std::ceil(walk.blocks / std::max(device.num_sms, 1)) >= kManyRounds &&
                          walk.longest <= kShortWalk;
  if (persistent) {
    s.next *= p.cu_seqlens_q ? 0.75 : 0.5;
  } else if (is_shortest_walk(p, shape)) {
    s.first += 500.0, s.next *= 0.45;
  }
  // The more heads are walked together, the shorter are the walks that the grid ends with.
  constexpr double kEven = 0.1;
  const double uneven = tail(p, head_dim_tile, variant);
  const double groups =
      static_cast<double>(heads_together(p, block_m(shape), persistent)) / kHeadsTogether;
  const double even = walks_all_heads_together(p) ? kEven : std::max(kEven, uneven / groups);
  return cost::one_block_per_sm_ns(p, walk, device, s, per_key, std::min(even, uneven));
}

// Whether persistent blocks have about even shares of the widest heads under causality: eight row
// blocks a head, of which each block has all equally often but for at most a sixteenth of its time.
bool has_even_shares(const AttentionParams& p, const DeviceInfo& device, std::int64_t tiles,
                     int head_dim_tile, Variant variant) {
  constexpr std::int64_t kLengths = 8, kMostKeys = 1024;
  if (head_dim_tile != 256 || variant != Variant::kTall || p.causal == Causal::kNone) return false;
  if (p.cu_seqlens_q || p.window_left >= 0 || device.num_sms % kFewOfWide != 0) return false;
  if (tiles > core::kMaxGrid) return false;
  const int rows = block_m(tile_shape(p, head_dim_tile, variant));
  if ((p.seqlen_q + rows - 1) / rows != kLengths || cuda::longest_walk(p, rows) > kMostKeys)
    return false;
  const std::int64_t rounds = (tiles + device.num_sms - 1) / device.num_sms;
  return rounds % kLengths == 0 && 16 * tiles >= 15 * rounds * device.num_sms;
}

// Thread blocks for a problem.
std::int64_t grid_of(const AttentionParams& params, const DeviceInfo& device, int head_dim_tile,
                     Variant variant) {
  const TileShape shape = tile_shape(params, head_dim_tile, variant);
  const std::int64_t tiles = num_work_tiles(params, head_dim_tile, variant);
  // A single stage of Q is free only after the results that go through it.
  if (shape.query_stages == 1 && score_mod_of(params) != ScoreMod::kNone) return tiles;
  if (is_shortest_walk(params, shape) && tiles <= core::kMaxGrid)
    return std::min<std::int64_t>(tiles, device.num_sms);
  const int rows = block_m(shape);
  std::int64_t few_keys = shape.query_stages > 1 ? 1024 : 512;
  // With eight row blocks a head shares are even under causality (heads_together()).
  const bool even = params.causal != Causal::kNone && params.window_left < 0 &&
                    !params.cu_seqlens_q && !is_cache(params) &&
                    (params.seqlen_q + rows - 1) / rows == 8;
  if (even && variant == Variant::kTall && head_dim_tile <= 64) few_keys = 2048;
  if (has_even_shares(params, device, tiles, head_dim_tile, variant)) return device.num_sms;
  // A pair loses more time between two tiles.
  const std::int64_t few_keys_alike = variant == Variant::kPairs ? 4096 : 2048;
  // Whole clusters: pairs have an even number of tiles.
  const std::int64_t blocks =
      cuda::num_blocks(params, device, tiles, rows, few_keys, few_keys_alike);
  return blocks / cluster_blocks(variant) * cluster_blocks(variant);
}

// Names what short blocks lack for a problem or its options; null if they serve it.
const char* short_blocks_lack(const AttentionParams& p, const Options& options, int head_dim_tile) {
  if (score_mod_of(p) != ScoreMod::kNone) return "score terms";
  if (p.cu_seqlens_q && !is_cache(p)) return "cu_seqlens_q";
  if (!has_short_blocks(head_dim_tile)) return "head dims above 128";
  // A sequence of a batch has the bits of one of a varlen batch then.
  return options.batch_invariant ? "batch_invariant" : nullptr;
}

// The same of blocks in pairs. Both walk the same keys: two tiles of a head's rows, each of which
// sees all keys.
const char* pairs_lack(const AttentionParams& p, const Options& options, int head_dim_tile) {
  if (score_mod_of(p) != ScoreMod::kNone) return "score terms";
  if (p.cu_seqlens_q) return "cu_seqlens_q";
  if (is_cache(p)) return "keys in a cache";
  if (!has_pairs(head_dim_tile)) return "head dims up to 192";
  if (p.causal != Causal::kNone) return "causal";
  if (p.window_left >= 0 || p.window_right >= 0) return "a window";
  const int rows = block_m(tile_shape(p, head_dim_tile, Variant::kPairs));
  if ((p.seqlen_q + rows - 1) / rows % 2 != 0) return "an odd number of tiles of rows";
  return options.batch_invariant ? "batch_invariant" : nullptr;
}

// Varlen sequences, whose bias and mask it does not take, would get other bits.
std::string varies_with_batch(const AttentionParams& p) {
  if (is_cache(p) || !(p.bias.data || p.mask.data)) return cost::varies_in_caches(p);
  return core::concat("does not implement ", p.mask.data ? "mask" : "bias",
                      " of varlen batches with batch_invariant");
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options& options,
                  Plan* plan, std::string* why) {
  const int tile = plan->head_dim_tile;
  if (!device.arch_specific_code)
    return refuse(why, "needs code for 90a, which this build does not have");
  if (const std::string refusal = cache_refusal(p, tile); !refusal.empty())
    return refuse(why, refusal);
  if (const char* feature = fixed_length_feature(p))
    return refuse(why, "does not implement ", feature);
  const double least = cost::kBehindMemory * cost::keys_ns(p, device);
  const std::optional<Variant> asked = variant_named(options.variant ? options.variant : "");
  if (options.variant && !asked)
    return refuse(why, "variant is ", options.variant, "; accepted: ", accepted_variants());
  const struct {
    Variant variant;
    const char* lack;
  } others[] = {{Variant::kShort, short_blocks_lack(p, options, tile)},
                {Variant::kPairs, pairs_lack(p, options, tile)}};
  // Tall blocks have the variant that the problem's score modifications need.
  Variant variant = variant_of(p);
  const bool asks_tall = !asked || asked == Variant::kTall || asked == variant;
  double ns = std::numeric_limits<double>::infinity();
  if (asks_tall) ns = predicted_ns(p, device, tile, variant);
  bool is_other = false;
  for (const auto& other : others) {
    if (asked ? asked != other.variant : other.lack != nullptr) continue;
    if (other.lack)
      return refuse(why, "variant ", options.variant, " does not implement ", other.lack);
    is_other = true;
    const double other_ns = predicted_ns(p, device, tile, other.variant);
    if (other_ns < ns) ns = other_ns, variant = other.variant;
  }
  if (!asks_tall && !is_other) {
    return refuse(why, "variant ", options.variant,
                  " is not for this problem's scores; accepted: ", name_of(variant));
  }
  ns = std::max(ns, least) * cost::few_rows_of_cache(p);
  if (!accepts_tensors(p, variant, why) || !accepts_scores(p, why)) return false;
  if (p.seqlen_k > tile::kMostKeys)
    return refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", tile::kMostKeys);
  TileConfig config = tile_config(tile, head_dim_v_tile(tile, p.head_dim_v), variant);
  if (variant == Variant::kLoaded) config.smem_bytes += bias_mask_bytes(p, tile);
  plan->variant = static_cast<int>(variant);
  plan->variant_name = name_of(variant);
  cost::set_tile(p, config, plan);
  plan->cluster_size = cluster_blocks(variant);
  plan->grid = grid_of(p, device, tile, variant);
  plan->all_heads_together = walks_all_heads_together(p);
  plan->predicted_ns = ns;
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"sm90",       90,   8,          accepted_variants,
                                     plan_forward, true, request_of, varies_with_batch};

}  // namespace dlattn::sm90
