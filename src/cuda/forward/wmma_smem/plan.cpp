#include "core/plan/plan.h"

#include "core/plan/family.h"
#include "cuda/forward/wmma_smem/traits.h"
#include "cuda/plan/cost.h"
#include "cuda/tile/accumulation_limits.h"

namespace dlattn::wmma_smem {
namespace {

// From what it takes on an H200 (DESIGN.md, "Figures"), rounded up, as one block per SM is: on
// grids that were not measured it is not to be taken for faster than wmma.
cost::Speed speed(const DeviceInfo& device, int head_dim_tile) {
  const double slower = cost::kH200Rate / cost::tensor_rate(device);
  if (head_dim_tile <= 64) return {10000, 45.0 * slower, 14.0 * slower};
  return {10000, 90.0 * slower, 26.0 * slower};
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options&, Plan* plan,
                  std::string* why) {
  if (const char* feature = core::score_feature(p))
    return core::refuse(why, "does not implement ", feature);
  if (p.seqlen_k > tile::kMostKeys) {
    return core::refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", tile::kMostKeys);
  }
  const int tile = plan->head_dim_tile;
  cost::plan_one_shape(p, device, tile_config(tile), speed(device, tile), plan);
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"wmma_smem", 0, 16, nullptr, plan_forward};

}  // namespace dlattn::wmma_smem
