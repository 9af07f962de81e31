#include <algorithm>
#include <string>

#include "core/plan/family.h"
#include "cuda/backward/wmma/shape.h"
#include "cuda/plan/backward_launches.h"
#include "cuda/plan/dbias_launch.h"

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

// The shares of mma.sync's rate that the kernels reach.
struct KeySpeed {
  double efficiency;
  double dq_products;  // as many as it takes as long as to compute dQ and to add it up
  double alone;        // by how much a block that has its SM to itself takes longer
};
KeySpeed key_speed(int head_dim_tile, bool is_large) {
  if (head_dim_tile <= 64) return {0.54, 0.95, 1.75};
  if (head_dim_tile <= 128) return {is_large ? 0.54 : 0.41, 0.75, 1.0};
  return {is_large ? 0.50 : 0.38, is_large ? 1.7 : 1.1, 1.0};
}
double query_efficiency(int head_dim_tile) {
  if (head_dim_tile <= 64) return 0.41;
  return head_dim_tile <= 128 ? 0.46 : 0.30;
}

constexpr double kFurtherBlock = 1000.0;  // nanoseconds of a round of blocks beside its steps

double keys_ns(const BackwardParams& b, const DeviceInfo& device, int tile, bool is_large) {
  const AttentionParams& p = b.forward;
  const KeySpeed speed = key_speed(tile, is_large);
  const double products = 4.0 + (sums_dq(b) ? speed.dq_products : 0.0);
  const double ns = cost::mma_pair_ns(p, device, tile, products, speed.efficiency);
  const double rows = key_tile(tile, is_large).block_m, keys = key_tile(tile, is_large).block_n;
  const cost::SeenTiles seen = cost::seen_tiles(p, rows, keys);
  const auto heads = static_cast<double>(p.num_heads), kv = static_cast<double>(p.num_heads_kv);
  const double blocks = cost::mean_blocks(p, cost::mean_seqlen_k(p), keys, kv);
  const double work = seen.pairs * heads * static_cast<double>(p.batch_size) * ns;
  const double longest = seen.queries * keys * heads / std::max(kv, 1.0) * ns * speed.alone;
  const double rounds = std::ceil(blocks / std::max(device.num_sms, 1));
  const double filled = std::min(cost::mean_seqlen_k(p) / keys, 1.0);
  return cost::kMmaLaunch + cost::grid_ns(p, device, work, longest, blocks) +
         std::max(rounds - 1.0, 0.0) * kFurtherBlock * filled;
}

double queries_ns(const BackwardParams& b, const DeviceInfo& device, int tile) {
  constexpr double kAlone = 0.85;  // of the long walk of a block, which a full SM slows
  const AttentionParams& p = b.forward;
  const double ns = cost::mma_pair_ns(p, device, tile, 3.0, query_efficiency(tile));
  const double rows = query_tile(tile).block_m, keys = query_tile(tile).block_n;
  const cost::SeenTiles seen = cost::seen_tiles(p, rows, keys);
  const auto heads = static_cast<double>(p.num_heads);
  const double blocks = cost::mean_blocks(p, cost::mean_seqlen_q(p), rows, heads);
  const double work = seen.pairs * heads * static_cast<double>(p.batch_size) * ns;
  return cost::kMmaLaunch + cost::grid_ns(p, device, work, seen.keys * rows * ns * kAlone, blocks);
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
  constexpr double kDelta = 2200.0, kConvertLaunch = 2000.0;  // nanoseconds beside their rows
  const AttentionParams& p = b.forward;
  const int tile = plan->head_dim_tile;
  plan->num_stages = 1;
  if (b.dalibi_slopes.data) plan->parts_per_head = slope_parts_per_head(p, tile);
  if (sums_dq(b)) plan->cleared_bytes = dq_sum_size(p, tile) * 4;
  plan->workspace_bytes = backward_workspace(b, plan->parts_per_head).own + plan->cleared_bytes;
  add_delta(b, plan);
  double ns = kDelta + cost::rows_ns(b, device, tile, sums_dq(b));
  bool is_first = true;
  // The first one is the plan's own launch.
  const auto add = [&](Kernel kernel, double launch_ns) {
    Launch* launch = plan;
    if (!is_first) {
      launch = &plan->after[plan->num_after++];
      *launch = *plan;
    }
    is_first = false;
    set_launch(b, kernel, tile, launch);
    ns += launch_ns;
  };
  if (b.dk.data || b.dv.data || b.dalibi_slopes.data) {
    const bool large = is_large(tile, device.max_smem_per_block);
    add(large ? kLarge : kKeys, keys_ns(b, device, tile, large));
  }
  if (sums_dq(b)) {
    add(kConvert, kConvertLaunch);
  } else if (b.dq.data) {
    add(kQueries, queries_ns(b, device, tile));
  }
  if (b.dbias.data) add(kBias, bias_ns(b, device, tile));
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
