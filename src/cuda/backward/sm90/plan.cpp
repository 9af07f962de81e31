#include <algorithm>
#include <string>

#include "core/plan/family.h"
#include "core/problem/alignment.h"
#include "cuda/backward/sm90/shape.h"
#include "cuda/plan/backward_launches.h"
#include "cuda/plan/cost.h"
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

// Operations of an SM per nanosecond, and a block's nanoseconds beside them; of an H200.
struct Speed {
  double rate, block;
};
Speed speed(const Plan& plan) {
  if (plan.head_dim_tile <= 64) return {3800.0, 5000.0};
  if (plan.head_dim_tile <= 128) return {4550.0, 8000.0};
  return {plan.variant == kPair ? 3700.0 : 2950.0, 8000.0};
}

// By how much ALiBi, and tiles of bias, mask and dbias, lengthen a step, on an H200: with the
// narrow heads, whose steps have twice the queries, by most.
double score_mod_factor(const BackwardParams& b, int head_dim_tile) {
  const AttentionParams& p = b.forward;
  const bool narrow = head_dim_tile <= 64;
  double factor = 1.0;
  if (p.alibi_slopes.data) factor += narrow ? 0.10 : 0.04;
  if (b.dalibi_slopes.data) factor += narrow ? 0.10 : 0.04;
  if (p.bias.data) factor += narrow ? 0.20 : 0.16;
  if (p.mask.data) factor += narrow ? 0.47 : 0.27;
  if (p.bias.data && p.mask.data) factor += 0.2;
  if (stores_dbias(b)) factor += narrow ? 1.1 : 0.7;
  return factor;
}

// For how long blocks that start together wait until each has its turn. Under causality they reach
// a tile one after another by themselves.
double semaphore_ns(const BackwardParams& b, const Plan& plan, const cost::Walk& walk, double sms) {
  constexpr double kTurn = 2000.0;  // from a block's additions to the next one's
  if (!adds_dq_in_order(b) || walk.longest > walk.mean) return 0.0;
  const AttentionParams& p = b.forward;
  const double heads = static_cast<double>(p.num_heads_kv * p.batch_size);
  const double of_head = static_cast<double>(plan.grid) / std::max(heads, 1.0);
  const double together = std::min<double>(kHeadsTogether, std::max(heads, 1.0));
  return kTurn * std::min(of_head, sms / together);
}

// Nanoseconds. A step is a tile of queries with a block's keys.
double predicted_ns(const BackwardParams& b, const Plan& plan, const DeviceInfo& device) {
  constexpr double kLaunches = 9000.0;
  constexpr double kWithSemaphores = 1.15;
  const auto [rate, block] = speed(plan);
  const AttentionParams& p = b.forward;
  const cost::Walk walk = cost::walk(p, 64, 1);
  const double pairs = walk.blocks * walk.mean * 64.0;  // of a query and a key
  const double per_pair = 10.0 * plan.head_dim_tile / rate * (p.softcap != 0.0 ? 1.5 : 1.0) *
                          score_mod_factor(b, plan.head_dim_tile);
  const double sms = std::max(static_cast<double>(device.num_sms), 1.0);
  const double group = static_cast<double>(p.num_heads) /
                       static_cast<double>(std::max<std::int64_t>(p.num_heads_kv, 1));
  const auto passes = static_cast<double>(num_passes(b));
  const double longest =  // of a thread block
      cost::mean_seqlen_q(p) * plan.block_n / plan.cluster_size * group * passes;
  const double blocks = static_cast<double>(plan.grid);
  const double most = cost::busiest_share(walk, pairs, blocks, longest, sms);
  const double rounds = std::ceil(blocks / sms);
  const double ns = kLaunches + rounds * passes * block + most * per_pair;
  if (!adds_dq_in_order(b)) return ns;
  // The longest blocks come last.
  const double tail = walk.longest > walk.mean ? longest / 2.0 * per_pair : 0.0;
  return kWithSemaphores * ns + tail + semaphore_ns(b, plan, walk, sms);
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
