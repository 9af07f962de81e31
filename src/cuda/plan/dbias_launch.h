#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/plan/backward_cost.h"
#include "cuda/plan/bias_grid.h"
#include "dlattn/plan.h"

// The launch of dbias that takes any shape of it, as sums over the rest: wmma's kernel `bias`,
// which computes both products of scores again. Other families list it too.
namespace dlattn {

inline double bias_ns(const BackwardParams& b, const DeviceInfo& device, int head_dim_tile) {
  constexpr double kEfficiency = 0.16, kTile = 64.0;
  const AttentionParams& p = b.forward;
  const double ns = cost::mma_pair_ns(p, device, head_dim_tile, 2.0, kEfficiency);
  const auto heads = static_cast<double>(p.num_heads * p.batch_size);
  const double work = cost::seen_tiles(p, kTile, kTile).pairs * heads * ns;
  const auto blocks = static_cast<double>(bias_grid(b, head_dim_tile).count());
  return cost::kMmaLaunch + cost::grid_ns(p, device, work, work / std::max(blocks, 1.0), blocks);
}

// Adds it to a plan, whose own launch is set.
inline void add_dbias(const BackwardParams& b, Plan* plan) {
  Launch& launch = plan->after[plan->num_after++];
  launch = *plan;
  launch.kernel = "wmma";
  launch.variant = kBiasVariant;
  launch.variant_name = kBiasName;
  launch.num_warps = kBiasWarps;
  launch.num_stages = 1;
  launch.block_m = bias_tile(plan->head_dim_tile).block_m;
  launch.block_n = bias_tile(plan->head_dim_tile).block_n;
  launch.smem_bytes = bias_smem_bytes(plan->head_dim_tile);
  launch.grid = std::max<std::int64_t>(bias_grid(b, plan->head_dim_tile).count(), 1);
}

}  // namespace dlattn
