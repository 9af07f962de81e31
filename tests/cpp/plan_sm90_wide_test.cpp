// Plans of sm90_wide.
#include <string>
#include <utility>

#include "check.h"
#include "core/plan/plan.h"
#include "cuda/forward/sm90_wide/traits.h"
#include "cuda/tile/accumulation_limits.h"
#include "plan_problems.h"

using namespace dlattn;
using test::force;
using test::gpus;
using test::problem;

namespace {

constexpr DType kHalves[] = {DType::kFloat16, DType::kBFloat16};
const DeviceInfo h200 = gpus()[3];
alignas(16) const std::int32_t numbers[64] = {};

void refused(const AttentionParams& p, const std::string& why, Options options = {}) {
  if (options.kernel == "auto") options.kernel = "sm90_wide";
  CHECK_THROWS(dlattn::plan(p, h200, options), UnsupportedError,
               "no kernel can run this: sm90_wide: " + why);
}

void served() {
  for (const DeviceInfo& device : gpus()) {
    for (const DType dtype : kHalves) {
      CHECK_EQ(supported(problem(dtype, 512), device, force("sm90_wide")).ok,
               device.compute_major == 9);
    }
  }
  AttentionParams p = problem(DType::kFloat16, 512);
  const Plan plan = dlattn::plan(p, h200, force("sm90_wide"));
  CHECK_EQ(plan.head_dim_tile, 512);
  const TileConfig config = sm90_wide::tile_config(512);
  CHECK_EQ(plan.block_m, config.block_m);
  CHECK_EQ(plan.block_n, config.block_n);
  CHECK_EQ(plan.num_warps, config.num_warps);
  CHECK_EQ(plan.smem_bytes, config.smem_bytes);
  CHECK(plan.smem_bytes <= h200.max_smem_per_block);
  // A cluster of two thread blocks for each 128 rows of a head.
  CHECK_EQ(plan.cluster_size, 2);
  CHECK_EQ(plan.grid, 2 * 2048 / 128 * 8 * 2);
  CHECK_EQ(plan.num_launches(), 1);
  CHECK_EQ(plan.workspace_bytes, 0);
  // Smaller heads have tiles of their own, with less work in less memory.
  for (const auto& [head_dim, tile] : {std::pair(264, 320), {320, 320}, {328, 384}, {392, 512}}) {
    const Plan smaller = dlattn::plan(problem(DType::kFloat16, head_dim), h200, force("sm90_wide"));
    CHECK_EQ(smaller.head_dim_tile, tile);
    CHECK_EQ(smaller.smem_bytes, sm90_wide::tile_config(tile).smem_bytes);
    CHECK((smaller.predicted_ns < plan.predicted_ns) == (tile < 512));
  }
  p.seqlen_q = 129;
  CHECK_EQ(dlattn::plan(p, h200, force("sm90_wide")).grid, 2 * 2 * 8 * 2);
  // One of the two head dims is enough.
  for (const bool of_v : {false, true}) {
    AttentionParams q = problem(DType::kFloat16, 264);
    (of_v ? q.head_dim : q.head_dim_v) = 64;
    CHECK(supported(q, h200, force("sm90_wide")).ok);
  }
}

void refusals() {
  AttentionParams p = problem(DType::kFloat16, 256);
  refused(p, "head_dim is 256 and head_dim of v 256; accepted: one of them above 256");
  p = problem(DType::kFloat16, 512);
  p.softcap = 30.0;
  refused(p, "does not implement softcap");
  p = problem(DType::kFloat16, 512);
  p.cu_seqlens_q = p.cu_seqlens_k = numbers, p.total_q = p.total_k = 4096;
  refused(p, "does not implement cu_seqlens_q");
  p = problem(DType::kFloat16, 512);
  p.seqused_k = numbers;
  refused(p, "does not read keys in a cache: seqused_k is given");
  p = problem(DType::kFloat16, 512);
  p.k.row_stride += 4;
  const std::string stride = std::to_string(p.k.row_stride * 2);
  refused(p, "k has a row stride of " + stride + " bytes; accepted: multiples of 16 from 0 to " +
                 std::to_string((std::int64_t{1} << 40) - 16));
  p = problem(DType::kFloat16, 512);
  p.out.row_stride += 4, p.out.batch_stride += 2048 * 4;
  refused(p, "rows of out are aligned to 8 bytes; accepted: 16");
  p = problem(DType::kFloat16, 512);
  p.k.batch_stride = p.v.batch_stride = 0;
  p.seqlen_k = tile::kMostKeys + 1;
  refused(p, "seqlen_k is 131073; accepted: up to 131072");
  DeviceInfo none = h200;
  none.arch_specific_code = false;
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 512), none, force("sm90_wide")),
               UnsupportedError,
               "no kernel can run this: sm90_wide: needs code for 90a, which this build does not "
               "have");
}

// Predicted times, of many rows and of few: more rows take longer, and causal ones less.
void times() {
  const auto ns = [](AttentionParams p, const char* kernel = "sm90_wide") {
    return dlattn::plan(p, h200, force(kernel)).predicted_ns;
  };
  AttentionParams p = problem(DType::kBFloat16, 512);
  p.batch_size = 1;
  AttentionParams causal = p, longer = p;
  causal.causal = Causal::kBottomRight;
  longer.seqlen_q = longer.seqlen_k = 8192;
  CHECK(ns(causal) < ns(p));
  CHECK(ns(longer) > 8.0 * ns(p));
  CHECK(ns(p) < ns(p, "wmma_halves"));
  CHECK(dlattn::plan(p, h200).kernel == "sm90_wide");
}

}  // namespace

int main() {
  served();
  refusals();
  times();
  return test::summary();
}
