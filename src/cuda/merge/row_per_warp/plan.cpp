#include <algorithm>

#include "core/plan/family.h"
#include "cuda/merge/row_per_warp/traits.h"

namespace dlattn::merge::row_per_warp {
namespace {

constexpr std::int64_t kMaxBlocks = 1 << 20;  // each takes further rows where there are more

bool plan_merge(const MergeParams& p, const DeviceInfo&, const Options&, Plan* plan, std::string*) {
  const std::int64_t rows = p.batch_size * p.seqlen_q * p.num_heads;
  plan->block_m = plan->num_warps = kNumWarps;
  plan->grid = std::min((rows + kNumWarps - 1) / kNumWarps, kMaxBlocks);
  plan->predicted_ns = 0.0;  // unknown
  return true;
}

}  // namespace

extern const core::Family<MergeParams> kFamily;
const core::Family<MergeParams> kFamily = {"row_per_warp", 0, 1, nullptr, plan_merge};

}  // namespace dlattn::merge::row_per_warp
