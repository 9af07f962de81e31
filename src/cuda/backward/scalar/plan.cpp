#include <algorithm>
#include <cmath>

#include "core/plan/family.h"
#include "cuda/backward/scalar/traits.h"
#include "cuda/plan/backward_cost.h"
#include "cuda/plan/backward_launches.h"

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

// Nanoseconds. A block walks the tiles that its own are seen by, or see, with 4 products of each
// for dk and dv, 3 for dq, 2 for dbias; of an H200.
double predicted_ns(const BackwardParams& b, const DeviceInfo& device) {
  constexpr double kLaunch = 2000.0, kBlock = 5500.0;
  constexpr double kStep = 5400.0, kProduct = 63.0;  // of a tile, and of a column of a product
  const AttentionParams& p = b.forward;
  const cost::SeenTiles seen = cost::seen_tiles(p, kTile, kTile);
  const double columns = std::ceil(static_cast<double>(p.head_dim + p.head_dim_v) / 2.0 / kDepth) *
                         static_cast<double>(kDepth);
  const auto batch = static_cast<double>(p.batch_size), heads = static_cast<double>(p.num_heads);
  const double kv = std::max(static_cast<double>(p.num_heads_kv), 1.0);
  const double tiles = seen.pairs / (kTile * kTile) * heads * batch;
  const double sms = std::max(static_cast<double>(device.num_sms), 1.0);
  const auto part_ns = [&](double products, double blocks, double longest) {
    const double step = kStep + kProduct * columns * products;
    return kLaunch + blocks / sms * kBlock + std::max(longest, tiles / sms) * step;
  };
  double ns = cost::rows_ns(b, device, 0, false);
  if (b.dk.data || b.dv.data)
    ns += part_ns(4.0, cost::mean_blocks(p, cost::mean_seqlen_k(p), kTile, kv),
                  seen.queries / kTile * heads / kv);
  if (b.dq.data || b.dalibi_slopes.data)
    ns +=
        part_ns(3.0, cost::mean_blocks(p, cost::mean_seqlen_q(p), kTile, heads), seen.keys / kTile);
  if (b.dbias.data) {
    const double blocks =
        static_cast<double>(std::max<std::int64_t>(bias_grid(bias_shape(b)).count(), 1));
    ns += part_ns(2.0, 0.0, tiles / blocks);
  }
  return ns;
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
