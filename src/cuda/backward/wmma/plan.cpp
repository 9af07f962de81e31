#include <algorithm>
#include <string>

#include "core/plan/family.h"
#include "cuda/backward/wmma/shape.h"
#include "cuda/plan/backward_launches.h"
#include "cuda/plan/mma_products.h"

namespace dlattn::backward_wmma {
namespace {

using core::concat;
using core::refuse;

// Sets what the family's own launches differ in.
void set_launch(const BackwardParams& b, Kernel kernel, int head_dim_tile, Launch* launch) {
  const bool is_keys = kernel == kKeys || kernel == kLarge;
  const KeyTile keys = key_tile(head_dim_tile, kernel == kLarge);
  const QueryTile queries = query_tile(head_dim_tile);
  launch->variant = kernel;
  launch->variant_name = kKernelNames[kernel];
  launch->num_warps = num_threads(head_dim_tile, kernel) / 32;
  launch->block_m = is_keys ? keys.block_m : queries.block_m;
  launch->block_n = is_keys ? keys.block_n : queries.block_n;
  launch->smem_bytes = smem_bytes(head_dim_tile, kernel);
  if (kernel == kConvert) {
    launch->block_m = kNumWarps * kPartRows;
    launch->block_n = 0;
  }
  launch->grid = std::max<std::int64_t>(num_blocks(b, kernel, head_dim_tile), 1);
}

std::string refusal(const BackwardParams& b) {
  const AttentionParams& p = b.forward;
  const int bytes = core::copy_bytes(p);
  if (bytes != 16)
    return concat("rows of q, k and v are aligned to ", bytes, " bytes; accepted: 16");
  const int dout_bytes =
      b.dout.data ? core::row_alignment(b.dout, core::query_sizes(p), kElementBytes) : 16;
  if (dout_bytes != 16)
    return concat("rows of dout are aligned to ", dout_bytes, " bytes; accepted: 16");
  if (p.softcap != 0.0 && b.dalibi_slopes.data)
    return "does not implement dalibi_slopes with softcap";
  return softcap_refusal(p);
}

bool plan_backward(const BackwardParams& b, const DeviceInfo& device, const Options&, Plan* plan,
                   std::string* why) {
  const std::string reason = refusal(b);
  if (!reason.empty()) return refuse(why, reason);
  const AttentionParams& p = b.forward;
  const int tile = plan->head_dim_tile;
  plan->num_stages = 1;
  if (b.dalibi_slopes.data) plan->parts_per_head = slope_parts_per_head(p, tile);
  if (sums_dq(b)) plan->cleared_bytes = dq_sum_size(p, tile) * 4;
  plan->workspace_bytes = backward_workspace(b, plan->parts_per_head).own + plan->cleared_bytes;
  add_delta(b, plan);
  double ns = 0.0;
  bool is_first = true;
  // The first one is the plan's own launch.
  const auto add = [&](Kernel kernel, double products) {
    Launch* launch = plan;
    if (!is_first) {
      launch = &plan->after[plan->num_after++];
      *launch = *plan;
    }
    is_first = false;
    set_launch(b, kernel, tile, launch);
    ns += cost::mma_products_ns(p, device, tile, products, static_cast<double>(launch->grid));
  };
  if (b.dk.data || b.dv.data || b.dalibi_slopes.data)
    add(is_large(tile, device.max_smem_per_block) ? kLarge : kKeys, sums_dq(b) ? 5.0 : 4.0);
  if (sums_dq(b)) {
    add(kConvert, 0.0);
  } else if (b.dq.data) {
    add(kQueries, 3.0);
  }
  if (b.dbias.data) add(kBias, 2.0);
  // dsinks, which the launches beside compute, may be all that is wanted.
  if (is_first) add(kQueries, 0.0);
  add_reduce(b, plan);
  plan->predicted_ns = ns;
  return true;
}

}  // namespace

extern const core::BackwardFamily kFamily;
const core::BackwardFamily kFamily = {"wmma", 0, 8, nullptr, plan_backward};

}  // namespace dlattn::backward_wmma
