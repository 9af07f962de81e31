#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/util/concat.h"
#include "cuda/delta/row_blocks/traits.h"
#include "cuda/plan/backward_workspace.h"
#include "cuda/reduce/partial_sums/traits.h"
#include "dlattn/plan.h"

// The launches that families of `backward` list beside their own, and what several of them refuse.
namespace dlattn {

// Families on tensor cores make tanh's argument of a product q.k by one factor, which must be a
// normal number of fp32. Names what is wrong with it; empty: nothing.
inline std::string softcap_refusal(const AttentionParams& p) {
  constexpr double kLeast = 0x1p-120, kMost = 0x1p120;
  const double factor = p.softcap != 0.0 ? p.softmax_scale / p.softcap : 1.0;
  if (factor >= kLeast && factor <= kMost) return {};
  return core::concat("softmax_scale / softcap is ", factor, "; accepted: ", kLeast, " to ", kMost);
}

// Adds the launch that prepares lse and delta. The plan's workspace_bytes and cleared_bytes are
// set.
inline void add_delta(const BackwardParams& b, Plan* plan) {
  Launch& launch = plan->before[plan->num_before++];
  launch = Launch();
  launch.operation = Operation::kDelta;
  launch.kernel = "row_blocks";
  launch.dtype = b.forward.q.dtype;
  launch.block_m = kDeltaRows;
  launch.num_warps = delta::row_blocks::kNumThreads / 32;
  launch.smem_bytes = delta::row_blocks::kSmemBytes;
  launch.grid = std::max<std::int64_t>(delta::row_blocks::num_tiles(b), 1);
}

// Adds the launch that adds up partial sums, if dsinks or dalibi_slopes are wanted. The plan's
// parts_per_head is set.
inline void add_reduce(const BackwardParams& b, Plan* plan) {
  const reduce::partial_sums::Shape shape =
      reduce::partial_sums::make_shape(b, plan->parts_per_head);
  const std::int64_t grid = shape.slopes.count() + shape.sinks.count();
  if (grid == 0) return;
  Launch& launch = plan->after[plan->num_after++];
  launch = Launch();
  launch.operation = Operation::kReduce;
  launch.kernel = "partial_sums";
  launch.dtype = DType::kFloat32;
  launch.block_m = 1;
  launch.num_warps = reduce::partial_sums::kNumThreads / 32;
  launch.smem_bytes = reduce::partial_sums::kSmemBytes;
  launch.grid = grid;
}

}  // namespace dlattn
