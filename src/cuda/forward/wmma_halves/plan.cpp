#include "core/plan/plan.h"

#include <algorithm>

#include "core/plan/family.h"
#include "core/problem/alignment.h"
#include "cuda/forward/wmma_halves/traits.h"
#include "cuda/plan/cost.h"
#include "cuda/tile/accumulation_limits.h"

namespace dlattn::wmma_halves {
namespace {

// From what it takes on an H200 (DESIGN.md, "Figures"), on others by the rates of their tensor
// cores. An SM has one block.
cost::Speed speed(const DeviceInfo& device, int) {
  const double per_key = 65.4 * cost::kH200Rate / cost::tensor_rate(device);
  return {9000, per_key, per_key};
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options&, Plan* plan,
                  std::string* why) {
  if (std::max(p.head_dim, p.head_dim_v) <= kMostOfWmma) {
    return core::refuse(why, "head_dim is ", p.head_dim, " and head_dim of v ", p.head_dim_v,
                        "; accepted: one of them above ", kMostOfWmma);
  }
  // Rows of more keys set accumulators aside in out (tile/accumulation_limits.h).
  const bool pairs = p.head_dim_v % 2 == 0 && core::store_bytes(p) >= 4;
  if (!pairs && p.seqlen_k > tile::kMostKeys) {
    return core::refuse(
        why, "seqlen_k is ", p.seqlen_k,
        "; accepted where pairs of out's columns are not aligned to 4 bytes: up to ",
        tile::kMostKeys);
  }
  const int tile = plan->head_dim_tile;
  cost::plan_one_shape(p, device, tile_config(tile), speed(device, tile), plan);
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"wmma_halves", 0, 1, nullptr, plan_forward};

}  // namespace dlattn::wmma_halves
