#include "core/plan.h"

#include "core/family.h"
#include "cuda/forward/cost.h"
#include "cuda/forward/wmma_smem/traits.h"
#include "cuda/tile/span.h"

namespace dlattn::wmma_smem {
namespace {

// From what it takes on an H200 (DESIGN.md, "Figures"), rounded up, as one block per SM is: on
// grids that were not measured it is not to be taken for faster than wmma.
cost::Speed speed(const DeviceInfo& device, int head_dim_tile) {
  const double slower = cost::kH200Rate / cost::tensor_rate(device);
  if (head_dim_tile <= 64) return {10000, 45.0 * slower, 14.0 * slower};
  return {10000, 90.0 * slower, 26.0 * slower};
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options& options,
                  Plan* plan, std::string* why) {
  if (const char* feature = core::score_feature(p))
    return core::refuse(why, "does not implement ", feature);
  if (p.seqlen_k > tile::kMostKeys) {
    return core::refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", tile::kMostKeys);
  }
  const int tile = plan->head_dim_tile;
  const cost::Speed s = speed(device, tile);
  if (s.fixed > plan->predicted_ns) return core::refuse(why, "is not faster");
  cost::set_tile(p, tile_config(tile), plan);
  AttentionParams large;
  const AttentionParams& counted = cost::counted(p, options.batch_invariant, &large);
  const cost::Walk walk = cost::walk(counted, plan->block_m, 1);
  plan->predicted_ns = cost::rounds_ns(walk, s, device.num_sms, 1.0);
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"wmma_smem", 0, 16, nullptr, plan_forward};

}  // namespace dlattn::wmma_smem
