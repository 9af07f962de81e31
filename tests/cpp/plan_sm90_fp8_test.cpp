// Plans of sm90_fp8.
#include <string>
#include <utility>

#include "check.h"
#include "core/plan/plan.h"
#include "core/problem/quantized.h"
#include "cuda/forward/sm90_fp8/traits.h"
#include "plan_problems.h"

using namespace dlattn;
using test::force;
using test::gpus;

namespace {

const DeviceInfo h200 = gpus()[3];
alignas(16) const float numbers[64] = {};

AttentionParams problem(std::int64_t head_dim) {
  AttentionParams p = test::problem(DType::kFloat8E4M3, head_dim);
  p.out.dtype = DType::kBFloat16;
  return p;
}

void served() {
  for (const DeviceInfo& device : gpus())
    CHECK_EQ(supported(problem(128), device, force("sm90_fp8")).ok, device.compute_major == 9);
  DeviceInfo without = h200;
  without.arch_specific_code = false;
  CHECK_THROWS(
      dlattn::plan(problem(128), without, force("sm90_fp8")), UnsupportedError,
      "no kernel can run this: sm90_fp8: needs code for 90a, which this build does not have");
  const std::pair<int, int> tiles[] = {{16, 64},   {64, 64},   {80, 128},  {128, 128},
                                       {144, 192}, {192, 192}, {208, 256}, {256, 256}};
  for (const auto& [head_dim, tile] : tiles) {
    const Plan plan = dlattn::plan(problem(head_dim), h200);
    CHECK(plan.kernel == "sm90_fp8");
    CHECK_EQ(plan.head_dim_tile, tile);
    const TileConfig config = sm90_fp8::tile_config(tile);
    CHECK_EQ(plan.block_m, config.block_m);
    CHECK_EQ(plan.block_n, config.block_n);
    CHECK_EQ(plan.num_warps, config.num_warps);
    CHECK_EQ(plan.smem_bytes, config.smem_bytes);
    CHECK(plan.smem_bytes <= h200.max_smem_per_block);
    CHECK_EQ(plan.grid, 2 * 8 * ((2048 + plan.block_m - 1) / plan.block_m));
  }
  AttentionParams wide_v = problem(128);
  wide_v.head_dim = 64;
  CHECK_EQ(dlattn::plan(wide_v, h200).head_dim_tile, 128);
  for (const std::int64_t head_dim : {64, 128, 192, 256}) {
    AttentionParams short_walks = problem(head_dim);
    short_walks.batch_size = 64, short_walks.seqlen_q = short_walks.seqlen_k = 512;
    CHECK_EQ(dlattn::plan(short_walks, h200, force("sm90_fp8")).grid, h200.num_sms);
  }
  // Causal walks of up to 1024 keys are short, or of half as many with a single stage of Q.
  for (const std::int64_t head_dim : {128, 192}) {
    AttentionParams causal = problem(head_dim);
    causal.causal = Causal::kBottomRight;
    causal.batch_size = 512, causal.seqlen_q = 128, causal.seqlen_k = 1024;
    CHECK_EQ(dlattn::plan(causal, h200, force("sm90_fp8")).grid,
             head_dim == 128 ? h200.num_sms : 8 * 512);
    causal.seqlen_k = 512;
    CHECK_EQ(dlattn::plan(causal, h200, force("sm90_fp8")).grid, h200.num_sms);
  }
  // Up to 1024 keys work tiles are taken by twos where they fill the device: 64 heads of 8 tiles
  // are 256 twos, for which 132 blocks need two rounds, 40 heads 160, for which they need two too.
  const auto grid = [](std::int64_t heads, std::int64_t seqlen, std::int64_t head_dim) {
    AttentionParams causal = problem(head_dim);
    causal.causal = Causal::kBottomRight;
    causal.batch_size = heads / 8, causal.seqlen_q = causal.seqlen_k = seqlen;
    return dlattn::plan(causal, h200, force("sm90_fp8")).grid;
  };
  CHECK_EQ(grid(64, 1024, 128), h200.num_sms);
  CHECK_EQ(grid(64, 2048, 128), 64 * 16);
  CHECK_EQ(grid(40, 1024, 128), 40 * 8);
  CHECK_EQ(grid(96, 1024, 128), 96 * 8);  // more than four for each block
  CHECK_EQ(grid(64, 1024, 192), 64 * 8);
}

// The tile of quantised rows is that of the columns with which they are stored.
void precision() {
  for (std::int64_t head_dim = 1; head_dim <= kMaxQuantizedHeadDim; ++head_dim) {
    AttentionParams p = test::problem(DType::kBFloat16, head_dim);
    p.precision = Precision::kFp8;
    p.quantized_kv = test::memory + 4 * test::kApart;
    CHECK_EQ(dlattn::plan(p, h200).head_dim_tile, quantized_columns(head_dim, head_dim));
    p.head_dim_v = 1;
    CHECK_EQ(dlattn::plan(p, h200).head_dim_tile, quantized_columns(head_dim, 1));
  }
}

template <typename Change>
void check_refused(Change change, const std::string& why) {
  AttentionParams p = problem(128);
  change(&p);
  CHECK_THROWS(dlattn::plan(p, h200, force("sm90_fp8")), UnsupportedError,
               "no kernel can run this: sm90_fp8: " + why);
}

void refused() {
  check_refused([](AttentionParams* p) { p->softcap = 3.0; }, "does not implement softcap");
  static constexpr std::int32_t starts[3] = {0, 1, 2};
  check_refused(
      [](AttentionParams* p) {
        p->cu_seqlens_q = p->cu_seqlens_k = starts, p->total_q = p->total_k = 2;
        p->mask.data = reinterpret_cast<const std::uint8_t*>(test::memory + 5 * test::kApart);
      },
      "does not implement mask with variable length");
  check_refused([](AttentionParams* p) { p->head_dim = 24; },
                "head_dim is 24; accepted: multiples of 16 up to 256");
  check_refused([](AttentionParams* p) { *p = problem(272); },
                "head_dim is 272; accepted: multiples of 16 up to 256");
  check_refused([](AttentionParams* p) { p->k.row_stride += 8; },
                "k has a row stride of 1032 bytes; accepted: multiples of 16 from 0 to " +
                    std::to_string((std::int64_t{1} << 40) - 16));
  check_refused([](AttentionParams* p) { p->v.data = test::memory + 8; },
                "v begins at 0x1000000000000008; accepted: multiples of 16 bytes");
  check_refused(
      [](AttentionParams* p) {
        p->q.dtype = p->k.dtype = p->v.dtype = p->out.dtype = DType::kFloat16;
      },
      "dtype is float16; accepted: float8_e4m3fn");
  // Out may lie anywhere, and descales are read wherever they are.
  AttentionParams p = problem(128);
  p.out.row_stride += 1, p.out.batch_stride += 2048;
  p.out.data = test::memory + 3 * test::kApart + 2;
  p.q_descale.data = numbers;
  p.mask.data = reinterpret_cast<const std::uint8_t*>(test::memory + 5 * test::kApart);
  p.bias.data = test::memory + 6 * test::kApart;
  p.bias.dtype = DType::kFloat32;
  CHECK(supported(p, h200, force("sm90_fp8")).ok);
}

}  // namespace

int main() {
  served();
  precision();
  refused();
  return test::summary();
}
