#include "core/plan/plan.h"

#include <algorithm>
#include <string>

#include "core/plan/family.h"
#include "core/problem/alignment.h"
#include "core/util/concat.h"
#include "cuda/forward/sm90_wide/boxes.h"
#include "cuda/plan/cost.h"
#include "cuda/plan/tensor_refusal.h"
#include "cuda/tile/accumulation_limits.h"

namespace dlattn::sm90_wide {
namespace {

using core::refuse;

// A cluster beside its keys, the same of each further one, and a key of all its rows at tile 512,
// on an H200 (research/steps/h200-large-heads.json).
constexpr double kFirst = 12000.0, kNext = 9000.0, kPerKey = 30.0;

bool accepts(const AttentionParams& p, std::string* why) {
  if (std::max(p.head_dim, p.head_dim_v) <= kMostOfSm90) {
    return refuse(why, "head_dim is ", p.head_dim, " and head_dim of v ", p.head_dim_v,
                  "; accepted: one of them above ", kMostOfSm90);
  }
  if (const char* const feature = core::score_feature(p))
    return refuse(why, "does not implement ", feature);
  if (p.cu_seqlens_q) return refuse(why, "does not implement cu_seqlens_q");
  const TensorBoxes boxes = tensor_boxes(p);
  for (const cuda::TensorBox* box : {&boxes.q, &boxes.k, &boxes.v}) {
    const std::string refusal = cuda::tma_refusal(*box);
    if (!refusal.empty()) return refuse(why, refusal);
  }
  if (const int bytes = core::store_bytes(p); bytes < 16)
    return refuse(why, "rows of out are aligned to ", bytes, " bytes; accepted: 16");
  return p.seqlen_k <= tile::kMostKeys ||
         refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", tile::kMostKeys);
}

double predicted_ns(const AttentionParams& p, const DeviceInfo& device, int tile) {
  // By the columns of both products, those of out in whole blocks.
  const double per_key =
      kPerKey * (tile + kConsumers * half_of(tile)) / static_cast<double>(2 * kMostColumns);
  const cost::OnePerSmSpeed speed = {kFirst, kNext, per_key, per_key};
  DeviceInfo clusters = device;  // each of which has the SMs of its blocks
  clusters.num_sms = std::max(device.num_sms / kClusterBlocks, 1);
  const double ns =
      cost::one_block_per_sm_ns(p, cost::walk(p, kBlockM, 1), clusters, speed, speed.per_key, 0.5);
  return std::max(ns, kFirst + cost::kBehindMemory * cost::keys_ns(p, device));
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options&, Plan* plan,
                  std::string* why) {
  if (!device.arch_specific_code)
    return refuse(why, "needs code for 90a, which this build does not have");
  if (!accepts(p, why)) return false;
  cost::set_tile(p, tile_config(plan->head_dim_tile), plan);
  plan->cluster_size = kClusterBlocks;
  plan->grid *= kClusterBlocks;
  plan->predicted_ns = predicted_ns(p, device, plan->head_dim_tile);
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"sm90_wide",  90,    8,       nullptr,
                                     plan_forward, false, nullptr, cost::varies_with_form};

}  // namespace dlattn::sm90_wide
