#include <algorithm>
#include <cmath>
#include <string>

#include "core/plan/family.h"
#include "core/problem/alignment.h"
#include "cuda/backward/sm90/shape.h"
#include "cuda/plan/backward_cost.h"
#include "cuda/plan/backward_launches.h"
#include "cuda/plan/dbias_launch.h"
#include "cuda/plan/tensor_box.h"
#include "cuda/plan/tensor_refusal.h"

namespace dlattn::backward_sm90 {
namespace {

using core::refuse;

// Names what the family lacks of a problem; empty if there is nothing.
std::string missing_feature(const BackwardParams& b, int head_dim_tile) {
  const AttentionParams& p = b.forward;
  if (p.bias.data && p.bias.dtype == DType::kFloat32) return "bias of float32";
  if (!has_score_mod(p) || p.softcap == 0.0 || has_score_mod_softcap_kernel(head_dim_tile))
    return {};
  const char* const name = p.bias.data ? "bias" : p.mask.data ? "mask" : "alibi_slopes";
  return core::concat(name, " with softcap and a head_dim of 65 to 128");
}

// Whether tensors lie as the kernels read and write them.
bool accepts_tensors(const BackwardParams& b, int head_dim_tile, std::string* why) {
  const TensorBoxes boxes = tensor_boxes(b, head_dim_tile);
  for (const cuda::TensorBox* box : {&boxes.q, &boxes.k, &boxes.v, &boxes.dout}) {
    const std::string tma_refusal = cuda::tma_refusal(*box);
    if (!tma_refusal.empty()) return refuse(why, tma_refusal);
  }
  const core::TensorSizes queries = core::query_sizes(b.forward);
  const core::TensorSizes keys = core::key_sizes(b.forward);
  const struct {
    const char* name;
    const MutableTensorView& view;
    const core::TensorSizes& sizes;
  } results[] = {{"dq", b.dq, queries}, {"dk", b.dk, keys}, {"dv", b.dv, keys}};
  for (const auto& x : results) {
    if (x.view.data && core::row_alignment(x.view, x.sizes, 2) != 16)
      return refuse(why, x.name, " has rows that are not aligned to 16 bytes");
  }
  return true;
}

// Operations of an SM per nanosecond, of an H200.
double rate(const Plan& plan) {
  if (plan.head_dim_tile <= 64) return 4330.0;
  if (plan.head_dim_tile <= 128) return 5330.0;
  return plan.variant == kPair ? 3890.0 : 3650.0;
}

// By how much ALiBi, and tiles of bias, mask and dbias, lengthen a step, on an H200. Rows that are
// not aligned to 16 bytes are copied number by number.
double score_mod_factor(const BackwardParams& b, int head_dim_tile) {
  const AttentionParams& p = b.forward;
  const bool narrow = head_dim_tile <= 64;
  const bool aligned_bias = p.bias.col_stride == 1 && p.bias.row_stride % 8 == 0;
  const bool aligned_mask = p.mask.col_stride == 1 && p.mask.row_stride % 16 == 0;
  double factor = 1.0;
  if (p.alibi_slopes.data) factor += narrow ? 0.20 : 0.15;
  if (b.dalibi_slopes.data) factor += narrow ? 0.10 : 0.04;
  if (p.bias.data) factor += aligned_bias ? 0.49 : 3.3;
  if (p.mask.data) factor += aligned_mask ? (narrow ? 0.87 : 0.61) : 6.7;
  if (stores_dbias(b)) factor += narrow ? 1.26 : 0.74;
  return factor * (p.softcap != 0.0 ? 1.47 : 1.0);
}

// Turns to add to dQ: for how long blocks that start together wait until each has its turn.
// Under causality they reach a tile one after another by themselves.
double semaphore_ns(const BackwardParams& b, const Plan& plan, double sms) {
  constexpr double kTurn = 900.0;  // from a block's additions to the next one's
  const AttentionParams& p = b.forward;
  if (p.causal != Causal::kNone || window_of<std::int64_t>(p).is_bounded()) return 0.0;
  const double heads = std::max(static_cast<double>(p.num_heads_kv * p.batch_size), 1.0);
  const double of_head = static_cast<double>(plan.grid) / heads;
  return kTurn * std::min(of_head, sms / std::min<double>(kHeadsTogether, heads));
}
// The same where a head's blocks have few queries between them and go on turn by turn.
double turns_ns(const BackwardParams& b, const Plan& plan) {
  const AttentionParams& p = b.forward;
  if (cost::mean_seqlen_k(p) <= 2.0 * cost::mean_seqlen_q(p)) return 0.0;
  const int tile = plan.head_dim_tile;
  const double turn = tile <= 64 ? 730.0 : tile <= 128 ? 1030.0 : 2950.0;
  const double kv = std::max(static_cast<double>(p.num_heads_kv), 1.0);
  const double heads = kv * static_cast<double>(std::max<std::int64_t>(p.batch_size, 1));
  const double of_head = static_cast<double>(plan.grid) / heads;
  return turn * of_head * std::ceil(heads / kHeadsTogether) * static_cast<double>(p.num_heads) /
         kv * score_mod_factor(b, tile);
}

// Nanoseconds. A step is a tile of queries with a block's keys.
double predicted_ns(const BackwardParams& b, const Plan& plan, const DeviceInfo& device) {
  constexpr double kLaunches = 3100.0, kConvertLaunch = 2100.0, kBlock = 2700.0;
  constexpr double kWithSemaphores = 1.28;
  const AttentionParams& p = b.forward;
  const bool in_order = adds_dq_in_order(b);
  const double keys = plan.block_n / plan.cluster_size;
  const cost::SeenTiles seen = cost::seen_tiles(p, plan.block_m, keys);
  const double per_pair = 10.0 * plan.head_dim_tile / rate(plan) *
                          score_mod_factor(b, plan.head_dim_tile) *
                          (in_order ? kWithSemaphores : 1.0);
  const double sms = std::max(static_cast<double>(device.num_sms), 1.0);
  const auto heads = static_cast<double>(p.num_heads);
  const double group = heads / static_cast<double>(std::max<std::int64_t>(p.num_heads_kv, 1));
  const auto passes = static_cast<double>(num_passes(b));
  const double work = seen.pairs * heads * static_cast<double>(p.batch_size) * per_pair;
  const double longest = seen.queries * keys * group * passes * per_pair;
  const auto blocks = static_cast<double>(plan.grid);
  const double ns = kLaunches + (b.dq.data ? kConvertLaunch : 0.0) +
                    cost::rows_ns(b, device, plan.head_dim_tile, b.dq.data) +
                    std::ceil(blocks / sms) * passes * kBlock +
                    cost::grid_ns(p, device, work, longest, blocks);
  return in_order ? std::max(ns + semaphore_ns(b, plan, sms), turns_ns(b, plan)) : ns;
}

bool plan_backward(const BackwardParams& b, const DeviceInfo& device, const Options&, Plan* plan,
                   std::string* why) {
  const AttentionParams& p = b.forward;
  const int tile = plan->head_dim_tile;
  const bool softcap = p.softcap != 0.0;
  const std::string feature = missing_feature(b, tile);
  if (!feature.empty()) return refuse(why, "has no ", feature);
  const std::string softcap_reason = softcap_refusal(p);
  if (!softcap_reason.empty()) return refuse(why, softcap_reason);
  if (!b.dout.data && p.out.data) return refuse(why, "needs dout");
  if (b.dsinks.data && !b.dq.data && !b.dk.data && !b.dv.data && !b.dalibi_slopes.data)
    return refuse(why, "computes dq, dk, dv and dalibi_slopes, of which none is wanted");
  if (!accepts_tensors(b, tile, why)) return false;
  if (has_score_mod(p)) {
    plan->variant = softcap ? kScoreModSoftcap : kScoreMod;
  } else if (adds_dq_in_order(b)) {
    plan->variant = softcap ? kDeterministicSoftcap : kDeterministic;
  } else {
    plan->variant = softcap                ? kSoftcap
                    : is_in_pairs(b, tile) ? kPair
                    : is_late(b, tile)     ? kLate
                                           : kPlain;
  }
  plan->variant_name = kKernelNames[plan->variant];
  plan->block_m = block_m(p, tile);
  plan->block_n = block_n(tile);
  plan->num_warps = kNumThreads / 32;
  plan->num_stages = kNumStages;
  plan->smem_bytes = smem_bytes(p, tile);
  plan->grid = std::max<std::int64_t>(num_key_blocks(b, tile), 1);
  if (plan->variant == kPair) {
    plan->block_n = kPairKeys;
    plan->smem_bytes = pair_smem_map(tile).total;
    plan->cluster_size = kPairBlocks;
    plan->grid *= kPairBlocks;
  }
  plan->predicted_ns = predicted_ns(b, *plan, device);
  plan->parts_per_head = slope_parts_per_head(b, tile);
  const BackwardWorkspace map = workspace_map(b, tile);
  plan->workspace_bytes = map.own + (b.dq.data ? dq_sum_bytes(p, tile) : 0);
  if (adds_dq_in_order(b)) plan->workspace_bytes += semaphore_bytes(p);
  // Blocks only store parts of dalibi_slopes whose queries see their keys.
  plan->cleared_bytes = plan->workspace_bytes - (plan->parts_per_head ? map.slope_parts : map.own);
  if (stores_first_dq(b, tile)) {
    plan->cleared_bytes = dq_counter_bytes(p);
    plan->workspace_bytes += plan->cleared_bytes;
  }
  add_delta(b, plan);
  if (b.dq.data) {
    Launch& convert = plan->after[plan->num_after++];
    convert = *plan;
    convert.variant = kConvert;
    convert.variant_name = kKernelNames[kConvert];
    convert.num_warps = kNumConsumers * kWarpgroupThreads / 32;
    convert.smem_bytes = 0;
    convert.cluster_size = 1;
    convert.grid = std::max<std::int64_t>(num_query_blocks(p, tile), 1);
  }
  if (b.dbias.data && !stores_dbias(b)) {
    add_dbias(b, plan);
    plan->predicted_ns += bias_ns(b, device, tile);
  }
  add_reduce(b, plan);
  return true;
}

}  // namespace

extern const core::BackwardFamily kFamily;
const core::BackwardFamily kFamily = {"sm90", 90, 8, nullptr, plan_backward};

}  // namespace dlattn::backward_sm90
