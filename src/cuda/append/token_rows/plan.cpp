#include "core/plan/family.h"
#include "cuda/append/token_rows/traits.h"

namespace dlattn::append::token_rows {
namespace {

bool plan_append(const AppendParams& p, const DeviceInfo&, const Options&, Plan* plan,
                 std::string*) {
  plan->block_m = 1;
  plan->num_warps = kNumThreads / 32;
  plan->grid = num_new_rows(p) * num_parts(p);
  plan->predicted_ns = 0.0;  // unknown
  return true;
}

}  // namespace

extern const core::Family<AppendParams> kFamily;
const core::Family<AppendParams> kFamily = {"token_rows", 0, 1, nullptr, plan_append};

}  // namespace dlattn::append::token_rows
