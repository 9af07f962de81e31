// Plans of sm90_latent.
#include <string>
#include <utility>

#include "check.h"
#include "core/plan/plan.h"
#include "cuda/forward/sm90_latent/traits.h"
#include "cuda/tile/accumulation_limits.h"
#include "plan_problems.h"

using namespace dlattn;
using test::force;
using test::gpus;
using test::latents;

namespace {

const DeviceInfo h200 = gpus()[3];
alignas(16) const std::int32_t numbers[64] = {};

void refused(const AttentionParams& p, const std::string& why, Options options = {}) {
  options.kernel = "sm90_latent";
  CHECK_THROWS(dlattn::plan(p, h200, options), UnsupportedError,
               "no kernel can run this: sm90_latent: " + why);
}

void served() {
  for (const DeviceInfo& device : gpus()) {
    CHECK_EQ(supported(latents(8, 4096, 16), device, force("sm90_latent")).ok,
             device.compute_major == 9);
  }
  const Plan plan = dlattn::plan(latents(8, 4096, 128), h200, force("sm90_latent"));
  CHECK_EQ(plan.head_dim_tile, 576);
  const TileConfig config = sm90_latent::tile_config(576, sm90_latent::kRows64);
  CHECK_EQ(plan.block_m, config.block_m);
  CHECK_EQ(plan.block_n, config.block_n);
  CHECK_EQ(plan.num_warps, config.num_warps);
  CHECK_EQ(plan.smem_bytes, config.smem_bytes);
  CHECK(plan.smem_bytes <= h200.max_smem_per_block);
  CHECK_EQ(plan.packed_heads, 128);
  // Sequences may be of any lengths: keys are spread over all SMs, and parts are added up.
  CHECK_EQ(plan.grid, h200.num_sms);
  CHECK_EQ(plan.num_after, 1);
  // In one wave: six blocks an SM, the same number for each of 16 row blocks.
  CHECK_EQ(plan.after[0].grid, 6 * 132 / 16 * 16);
  CHECK_EQ(plan.workspace_bytes,
           sm90_latent::workspace_map(8, 2 * plan.grid, plan.block_m, 576).total);
  AttentionParams p = latents(66, 4096, 128);
  p.seqused_k = nullptr;  // all are as long as the table
  CHECK_EQ(dlattn::plan(p, h200, force("sm90_latent")).workspace_bytes, 0);
  CHECK_EQ(dlattn::plan(p, h200, force("sm90_latent")).grid, 2 * 66);
}

// The narrowest shape that has all rows, but where numbers of queries must not matter.
void variants() {
  const auto variant_of = [](std::int64_t heads, const Options& options) {
    const Plan plan = dlattn::plan(latents(8, 4096, heads), h200, options);
    const TileConfig config = sm90_latent::tile_config(576, plan.variant);
    CHECK_EQ(plan.block_m, 64);
    CHECK_EQ(plan.num_warps, config.num_warps);
    CHECK_EQ(plan.smem_bytes, config.smem_bytes);
    CHECK(plan.smem_bytes <= h200.max_smem_per_block);
    return std::string(plan.variant_name);
  };
  Options options = force("sm90_latent");
  CHECK(variant_of(16, options) == "rows16");
  CHECK(variant_of(17, options) == "rows32");
  CHECK(variant_of(33, options) == "rows64");
  options.variant = "rows64";
  CHECK(variant_of(8, options) == "rows64");
  options.variant = "rows16";
  refused(latents(8, 4096, 20),
          "seqlen_q x heads of a group is 20; accepted by variant rows16: up to 16", options);
  options.variant = "rows8";
  refused(latents(8, 4096, 8), "variant is rows8; accepted: rows16, rows32, rows64", options);
  options = force("sm90_latent"), options.batch_invariant = true;
  CHECK(variant_of(8, options) == "rows64");
}

// Row blocks side by side are a cluster's; so are two parts of others.
void clusters() {
  const auto plan_of = [](std::int64_t batch, std::int64_t heads) {
    return dlattn::plan(latents(batch, 4096, heads), h200, force("sm90_latent"));
  };
  CHECK_EQ(plan_of(64, 128).cluster_size, 2);
  CHECK_EQ(plan_of(64, 128).grid, 132);
  CHECK_EQ(plan_of(64, 16).cluster_size, 2);
  CHECK_EQ(plan_of(64, 192).cluster_size, 2);
  Options options = force("sm90_latent");
  options.num_splits = 3;
  CHECK_EQ(dlattn::plan(latents(64, 4096, 16), h200, options).cluster_size, 1);
  CHECK_EQ(dlattn::plan(latents(64, 4096, 128), h200, options).cluster_size, 2);
  options.num_splits = 0, options.allow_workspace = false;
  CHECK_EQ(dlattn::plan(latents(64, 4096, 16), h200, options).cluster_size, 1);
}

void divisions() {
  Options options = force("sm90_latent");
  options.allow_workspace = false;
  const Plan whole = dlattn::plan(latents(8, 4096, 128), h200, options);
  CHECK_EQ(whole.grid, 16);
  CHECK_EQ(whole.num_splits, 1);
  options.allow_workspace = true, options.num_splits = 3;
  const Plan three = dlattn::plan(latents(8, 4096, 16), h200, options);
  CHECK(three.fixed_splits);
  CHECK_EQ(three.num_splits, 3);
  options.num_splits = 0, options.batch_invariant = true;
  const Plan invariant = dlattn::plan(latents(8, 4096, 16), h200, options);
  CHECK_EQ(invariant.split_size, 1024);
  CHECK_EQ(invariant.num_splits, 4);
  // A thread block adds up at most so many keys of a row block, whatever the lengths are.
  const std::int64_t most = tile::kMostKeys;
  options = force("sm90_latent");
  CHECK_EQ(dlattn::plan(latents(1, 8 * most, 16), h200, options).split_size, 0);
  CHECK_EQ(dlattn::plan(latents(512, 2 * most, 16), h200, options).split_size, most);
  options.num_splits = 2;
  refused(latents(1, 4 * most, 16), "seqlen_k is 524288; accepted: up to 131072 in a part",
          options);
}

// Keys of 8 bits: e4m3 alone, with few rows.
void keys_of_8_bits() {
  static const float scale = 0.5f;
  const auto in_8_bits = [](AttentionParams p, DType dtype = DType::kFloat8E4M3) {
    p.k.dtype = p.v.dtype = dtype;
    p.k_descale.data = p.v_descale.data = &scale;
    return p;
  };
  for (const auto& [heads, variant] :
       {std::pair(8, sm90_latent::kRows16), {17, sm90_latent::kRows32}}) {
    const Plan plan = dlattn::plan(in_8_bits(latents(8, 4096, heads)), h200, force("sm90_latent"));
    CHECK(plan.dtype == DType::kFloat8E4M3);
    CHECK_EQ(plan.variant, variant);
    CHECK_EQ(plan.block_m, 64);
    const TileConfig config = sm90_latent::tile_config(576, variant, 1);
    CHECK_EQ(plan.num_warps, config.num_warps);
    CHECK_EQ(plan.smem_bytes, config.smem_bytes);
    CHECK(plan.smem_bytes <= h200.max_smem_per_block);
    CHECK(plan.after[0].dtype == plan.dtype);
  }
  CHECK(dlattn::plan(in_8_bits(latents(64, 4096, 16)), h200).kernel == "sm90_latent");
  CHECK(dlattn::plan(in_8_bits(latents(64, 4096, 128)), h200).kernel == "decode");
  CHECK(dlattn::plan(in_8_bits(latents(64, 4096, 16), DType::kInt8), h200).kernel == "decode");
  refused(in_8_bits(latents(8, 4096, 16), DType::kInt8),
          "dtype is int8; accepted: float16, bfloat16");
  refused(in_8_bits(latents(8, 4096, 33)),
          "seqlen_q x heads of a group is 33; accepted by variant rows32: up to 32");
  Options options = force("sm90_latent");
  options.variant = "rows64";
  refused(in_8_bits(latents(8, 4096, 16)), "variant rows64 does not read keys of 8 bits", options);
  options.variant = nullptr, options.batch_invariant = true;
  refused(in_8_bits(latents(8, 4096, 16)), "does not run with batch_invariant over keys of 8 bits",
          options);
  CHECK(dlattn::plan(in_8_bits(latents(8, 4096, 16)), h200,
                     [] {
                       Options o;
                       o.batch_invariant = true;
                       return o;
                     }())
            .kernel == "decode");
}

void refusals() {
  AttentionParams p = latents(2, 4096, 16);
  p.v.data = static_cast<const char*>(p.v.data) + 128;
  refused(p, "does not read v unless it is the first columns of k");
  p = latents(2, 4096, 16), p.head_dim_v = 520;
  p.out.row_stride = p.out.batch_stride = 16 * 520, p.out.head_stride = 520;
  refused(p, "head_dim of v is 520; accepted: up to 512");
  p = latents(2, 4096, 16), p.head_dim = 256, p.head_dim_v = 128;
  refused(p, "head_dim is 256; accepted: from 264");
  p = latents(2, 4096, 16), p.page_size = 4;
  refused(p, "page_size is 4; accepted: multiples of 8");
  p = latents(2, 4096, 16), p.k.row_stride = p.v.row_stride = 580;
  refused(p, "k has a batch stride of 36864 elements; accepted: multiples of its row stride, 580");
  p = latents(2, 4096, 16), p.k.row_stride = p.v.row_stride = 580;
  p.k.batch_stride = p.v.batch_stride = 64 * 580;
  refused(p, "k has a row stride of 1160 bytes; accepted: multiples of 16 from 0 to 17179869168");
  p = latents(2, 4096, 16), p.out.head_stride = 516;
  p.out.row_stride = p.out.batch_stride = 16 * 516;
  refused(p, "rows of out are aligned to 8 bytes; accepted: 16");
  p = latents(2, 4096, 16), p.softcap = 5.0;
  refused(p, "does not implement softcap");
  p = latents(2, 4096, 16), p.leftpad_k = numbers;
  p.page_table.data = nullptr;
  refused(p, "does not implement leftpad_k");
}

}  // namespace

int main() {
  served();
  variants();
  keys_of_8_bits();
  clusters();
  divisions();
  refusals();
  return test::summary();
}
