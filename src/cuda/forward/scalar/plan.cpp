#include "core/plan/family.h"
#include "cuda/forward/scalar/traits.h"
#include "cuda/plan/cost.h"

namespace dlattn::scalar {
namespace {

// From what it takes on an H200 (DESIGN.md, "Figures"), rounded up, as one block per SM is: on
// grids that were not measured it is not to be taken for faster than wmma.
cost::Speed speed(int head_dim_tile) {
  if (head_dim_tile <= 64) return {10000, 72.0, 46.0};
  return head_dim_tile <= 128 ? cost::Speed{10000, 120.0, 77.0} : cost::Speed{15000, 126.0, 80.0};
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options&, Plan* plan,
                  std::string*) {
  const int tile = plan->head_dim_tile;
  const TileConfig config = tile_config(static_cast<int>(size_of(p.q.dtype)), tile, p.seqlen_k);
  cost::plan_one_shape(p, device, config, speed(tile), plan);
  if (is_cache(p)) plan->predicted_ns *= 2.0;  // rows are looked up one by one
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"scalar", 0, 1, nullptr, plan_forward, true};

}  // namespace dlattn::scalar
