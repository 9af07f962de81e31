#include <algorithm>

#include "core/plan/family.h"
#include "cuda/backward/scalar/traits.h"
#include "cuda/plan/backward_launches.h"
#include "cuda/plan/cost.h"

namespace dlattn::backward_scalar {
namespace {

// Sets what the family's own launches have in common.
void set_launch(Kernel kernel, std::int64_t grid, Launch* launch) {
  launch->variant = kernel;
  launch->variant_name = kKernelNames[kernel];
  launch->block_m = launch->block_n = kTile;
  launch->num_warps = kNumThreads / 32;
  launch->smem_bytes = kSmemBytes;
  launch->grid = std::max<std::int64_t>(grid, 1);
}

// Nanoseconds: products of every pair of a query and a key, 4 for dk and dv, 3 for dq, 2 for dbias,
// at a fraction of the rate of FFMA.
double predicted_ns(const BackwardParams& b, const DeviceInfo& device) {
  constexpr double kRate = 60.0;  // multiplications that an SM adds up per nanosecond
  const AttentionParams& p = b.forward;
  const cost::Walk walk = cost::walk(p, kTile, 1);
  const double products = (b.dk.data || b.dv.data ? 4.0 : 0.0) +
                          (b.dq.data || b.dalibi_slopes.data ? 3.0 : 0.0) +
                          (b.dbias.data ? 2.0 : 0.0);
  const auto columns = static_cast<double>(p.head_dim + p.head_dim_v) / 2.0;
  const double sms = std::max(static_cast<double>(device.num_sms), 1.0);
  return 20000.0 + walk.blocks * walk.mean * kTile * columns * products / (kRate * sms);
}

bool plan_backward(const BackwardParams& b, const DeviceInfo& device, const Options&, Plan* plan,
                   std::string*) {
  const AttentionParams& p = b.forward;
  // In their order; the first one that is wanted is the plan's own. Where dsinks alone is wanted,
  // which the launches beside compute, that has nothing to do.
  const bool keys = b.dk.data || b.dv.data;
  const bool queries = b.dq.data || b.dalibi_slopes.data;
  plan->num_stages = 1;
  if (b.dalibi_slopes.data) plan->parts_per_head = query_grid(p).tiles;
  plan->workspace_bytes = backward_workspace(b, plan->parts_per_head).own;
  add_delta(b, plan);
  bool is_first = true;
  const auto add = [&](Kernel kernel, std::int64_t grid) {
    if (is_first) {
      set_launch(kernel, grid, plan);
    } else {
      Launch& launch = plan->after[plan->num_after++];
      launch = *plan;
      set_launch(kernel, grid, &launch);
    }
    is_first = false;
  };
  if (keys) add(kKeys, key_grid(p).count());
  if (queries) add(kQueries, query_grid(p).count());
  if (b.dbias.data) add(kBias, bias_grid(bias_shape(b)).count());
  if (is_first) add(kQueries, 0);
  plan->variant_name = "";  // the text's name of a kernel is one that may be asked for
  add_reduce(b, plan);
  plan->predicted_ns = predicted_ns(b, device);
  return true;
}

}  // namespace

extern const core::BackwardFamily kFamily;
const core::BackwardFamily kFamily = {"scalar", 0, 1, nullptr, plan_backward};

}  // namespace dlattn::backward_scalar
