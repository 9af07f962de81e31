#include "core/plan/plan.h"

#include "core/plan/family.h"
#include "cuda/forward/wmma_qk/traits.h"
#include "cuda/plan/cost.h"

namespace dlattn::wmma_qk {
namespace {

// From what it takes on an H200 (DESIGN.md, "Figures"), rounded up, as one block per SM is: on
// grids that were not measured it is not to be taken for faster than wmma.
cost::Speed speed(int head_dim_tile) {
  return head_dim_tile <= 64 ? cost::Speed{10000, 65.0, 41.0} : cost::Speed{10000, 110.0, 73.0};
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options&, Plan* plan,
                  std::string* why) {
  if (const char* feature = core::score_feature(p))
    return core::refuse(why, "does not implement ", feature);
  const int tile = plan->head_dim_tile;
  cost::plan_one_shape(p, device, tile_config(tile, p.seqlen_k), speed(tile), plan);
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"wmma_qk", 0, 16, nullptr, plan_forward};

}  // namespace dlattn::wmma_qk
