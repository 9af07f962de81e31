#include "core/plan.h"

#include "core/family.h"
#include "cuda/forward/cost.h"
#include "cuda/forward/scalar/traits.h"

namespace dlattn::scalar {
namespace {

// Measured on an H200 (DESIGN.md, "Figures"): enough to tell it from families of other speeds.
cost::Speed speed(int head_dim_tile) {
  if (head_dim_tile <= 64) return {6000, 68.0, 46.0};
  return head_dim_tile <= 128 ? cost::Speed{8000, 113.0, 77.0} : cost::Speed{15000, 126.0, 80.0};
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options& options,
                  Plan* plan, std::string* why) {
  const int tile = plan->head_dim_tile;
  const cost::Speed s = speed(tile);
  if (s.fixed > plan->predicted_ns) return core::refuse(why, "is not faster");
  cost::set_tile(p, tile_config(static_cast<int>(size_of(p.dtype)), tile, p.seqlen_k), plan);
  constexpr double kBlocksPerSm = 3;
  AttentionParams large;
  const AttentionParams& counted = cost::counted(p, options.batch_invariant, &large);
  const cost::Walk walk = cost::walk(counted, plan->block_m, 1);
  plan->predicted_ns = cost::rounds_ns(walk, s, device.num_sms, kBlocksPerSm);
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"scalar", 0, 1, nullptr, plan_forward};

}  // namespace dlattn::scalar
