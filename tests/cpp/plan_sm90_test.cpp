// Plans of sm90.
#include <algorithm>
#include <string>
#include <string_view>

#include "check.h"
#include "core/plan/plan.h"
#include "cuda/forward/sm90/head_order.h"
#include "cuda/forward/sm90/traits.h"
#include "plan_problems.h"

using namespace dlattn;
using test::force;
using test::gpus;
using test::memory;
using test::problem;

namespace {

const DeviceInfo h200 = gpus()[3];
alignas(16) const float numbers[64] = {};
alignas(16) const std::uint8_t bools[64] = {};

// On which devices, and in which tiles.
void served() {
  for (const DeviceInfo& device : gpus()) {
    const Support support = supported(problem(DType::kFloat16, 64), device, force("sm90"));
    CHECK_EQ(support.ok, device.compute_major == 9);
    if (device.compute_major == 9) continue;
    CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 64), device, force("sm90")),
                 UnsupportedError,
                 "no kernel can run this: sm90: needs compute capability 9.0; " + device.name +
                     " has 8." + std::to_string(device.compute_minor));
  }
  DeviceInfo without = h200;
  without.arch_specific_code = false;
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 64), without, force("sm90")), UnsupportedError,
               "no kernel can run this: sm90: needs code for 90a, which this build does not have");
  AttentionParams large = problem(DType::kFloat16, 128);
  large.batch_size = 64;
  CHECK(dlattn::plan(large, h200).kernel == "sm90");
  CHECK(dlattn::plan(large, without).kernel == "wmma");
  const struct {
    int head_dim, head_dim_v, tile, tile_v;
  } dims[] = {
      {8, 8, 64, 64},       {64, 64, 64, 64},     {72, 72, 96, 96},     {96, 96, 96, 96},
      {96, 104, 128, 128},  {128, 128, 128, 128}, {136, 136, 192, 192}, {192, 192, 192, 192},
      {192, 136, 192, 192}, {192, 128, 192, 128}, {136, 8, 192, 128},   {128, 192, 192, 192},
      {200, 128, 256, 256}, {256, 256, 256, 256},
  };
  for (const auto& d : dims) {
    AttentionParams p = problem(DType::kBFloat16, std::max(d.head_dim, d.head_dim_v));
    p.head_dim = d.head_dim, p.head_dim_v = d.head_dim_v;
    const Plan plan = dlattn::plan(p, h200, force("sm90"));
    CHECK(plan.kernel == "sm90");
    CHECK_EQ(plan.head_dim_tile, d.tile);
    const TileConfig config =
        sm90::tile_config(d.tile, d.tile_v, static_cast<sm90::Variant>(plan.variant));
    CHECK_EQ(plan.block_m, config.block_m);
    CHECK_EQ(plan.block_n, config.block_n);
    CHECK_EQ(plan.num_warps, config.num_warps);
    CHECK_EQ(plan.smem_bytes, config.smem_bytes);
    CHECK(plan.smem_bytes <= h200.max_smem_per_block);
    CHECK(plan.grid > 0 && plan.grid <= (2047 / config.block_m + 1) * 8 * 2);
  }
}

void refused() {
  static const std::int32_t offsets[3] = {0, 1, 2};
  const struct {
    void (*change)(AttentionParams&);
    const char* why;
  } cases[] = {
      {[](AttentionParams& p) {
         p.bias.data = numbers, p.bias.dtype = DType::kFloat32, p.bias.col_stride = 0;
       },
       "bias has a column stride of 0 elements; accepted: 1"},
      {[](AttentionParams& p) { p.mask.data = bools, p.mask.col_stride = 2048; },
       "mask has a column stride of 2048 elements; accepted: 1"},
      {[](AttentionParams& p) {
         p.bias.data = numbers, p.bias.dtype = DType::kFloat32, p.bias.col_stride = 1,
         p.bias.row_stride = 2046;
       },
       "bias has a row stride of 8184 bytes; accepted: multiples of 16 from 0 to 1099511627760"},
      {[](AttentionParams& p) {
         p.mask.data = bools, p.mask.col_stride = 1, p.mask.head_stride = 8;
       },
       "mask has a head stride of 8 bytes; accepted: multiples of 16 from 0 to 1099511627760"},
      {[](AttentionParams& p) {
         p.head_dim = 256, p.bias.data = numbers, p.bias.dtype = DType::kFloat32,
         p.bias.col_stride = 1, p.mask.data = bools;
         p.mask.col_stride = 1;
       },
       "needs 238592 bytes of shared memory per block; H200 has 232448"},
      {[](AttentionParams& p) {
         p.cu_seqlens_q = p.cu_seqlens_k = offsets, p.total_q = p.total_k = 2;
         p.mask.data = bools, p.mask.col_stride = 1;
       },
       "does not implement mask with cu_seqlens_q"},
      {[](AttentionParams& p) { p.softcap = 1e5; },
       "softcap / softmax_scale is 800000; accepted: 6.10352e-05 to 16384"},
      {[](AttentionParams& p) { p.softcap = 1e-6; },
       "softcap / softmax_scale is 8e-06; accepted: 6.10352e-05 to 16384"},
      {[](AttentionParams& p) { p.seqlen_k = 131073; },
       "seqlen_k is 131073; accepted: up to 131072"},
      {[](AttentionParams& p) { p.alibi_slopes.data = numbers, p.softmax_scale = 1e-20; },
       "softmax_scale is 1e-20; accepted with alibi_slopes: from 9.53674e-07"},
      {[](AttentionParams& p) { p.head_dim = 20; },
       "head_dim is 20; accepted: multiples of 8 up to 256"},
      {[](AttentionParams& p) { p.head_dim_v = 60; },
       "head_dim of v is 60; accepted: multiples of 8 up to 256"},
      {[](AttentionParams& p) { p.k.row_stride = 516; },
       "k has a row stride of 1032 bytes; accepted: multiples of 16 from 0 to 1099511627760"},
      {[](AttentionParams& p) { p.q.batch_stride = std::int64_t{1} << 39; },
       "q has a batch stride of 1099511627776 bytes; accepted: multiples of 16 from 0 to "
       "1099511627760"},
  };
  for (const auto& r : cases) {
    AttentionParams p = problem(DType::kFloat16, 64);
    r.change(p);
    CHECK_THROWS(dlattn::plan(p, h200, force("sm90")), UnsupportedError,
                 std::string("no kernel can run this: sm90: ") + r.why);
    CHECK(dlattn::plan(p, h200).kernel == "wmma");  // it goes elsewhere by itself
  }
  AttentionParams odd = problem(DType::kFloat16, 64);
  odd.out.data = memory + 3 * test::kApart + 8;
  const Support support = supported(odd, h200, force("sm90"));
  CHECK(!support.ok && support.reasons[0].find("sm90: out begins at ") == 0);
  CHECK(support.reasons[0].find("; accepted: multiples of 16 bytes") != std::string::npos);
  // A dimension of one element has no stride; without keys there is nothing to copy.
  AttentionParams p = problem(DType::kFloat16, 64);
  p.batch_size = 1, p.q.batch_stride = 3, p.seqlen_k = 0, p.k.data = p.v.data = nullptr,
  p.k.row_stride = 1;
  CHECK(supported(p, h200, force("sm90")).ok);
}

void score_terms() {
  // Score terms have kernels of their own.
  for (const int head_dim : {64, 128, 256}) {
    for (const bool alibi : {false, true}) {
      AttentionParams p = problem(DType::kFloat16, head_dim);
      if (alibi) p.alibi_slopes.data = numbers;
      if (!alibi) p.softcap = 30.0;
      const Plan plan = dlattn::plan(p, h200);
      CHECK(plan.kernel == "sm90");
      CHECK(std::string(plan.variant_name) == "softcap_alibi");
      const TileConfig config = sm90::tile_config(head_dim, head_dim, sm90::Variant::kComputed);
      CHECK_EQ(plan.block_m, config.block_m);
      CHECK_EQ(plan.smem_bytes, config.smem_bytes);
      CHECK_EQ(plan.num_warps, config.num_warps);
    }
  }
  // Those of small grids are decode's, which divides their keys; with batch_invariant they may not
  // be, and wmma has no tiles for them but its general ones.
  for (const std::int64_t seqlen : {256, 512}) {
    AttentionParams p = problem(DType::kFloat16, 64);
    p.batch_size = 1, p.seqlen_q = p.seqlen_k = seqlen, p.softcap = 30.0;
    CHECK(dlattn::plan(p, h200).kernel == "decode");
    Options invariant;
    invariant.batch_invariant = true;
    CHECK(dlattn::plan(p, h200, invariant).kernel == "sm90");
    p.softcap = 0.0;
    CHECK(dlattn::plan(p, h200).kernel == "wmma");
  }
  // Bias and mask take two stages of shared memory where there is room, else one.
  const struct {
    int head_dim;
    bool wide, mask;
    int stages;
  } loaded[] = {{64, false, true, 2},   {64, true, true, 1},   {128, true, true, 2},
                {256, false, false, 2}, {256, false, true, 1}, {256, true, false, 1}};
  for (const auto& c : loaded) {
    AttentionParams p = problem(DType::kFloat16, c.head_dim);
    p.batch_size = 8;
    p.bias.data = numbers, p.bias.dtype = DType::kFloat32, p.bias.col_stride = 1;
    p.bias.dtype = c.wide ? DType::kFloat32 : DType::kFloat16;
    if (c.mask) p.mask.data = bools, p.mask.col_stride = 1;
    const Plan plan = dlattn::plan(p, h200);
    CHECK(plan.kernel == "sm90");
    CHECK(std::string(plan.variant_name) == "bias_mask");
    const int tiles = (plan.block_m * plan.block_n) * ((c.wide ? 4 : 2) + (c.mask ? 1 : 0));
    const TileConfig config = sm90::tile_config(c.head_dim, c.head_dim, sm90::Variant::kLoaded);
    CHECK_EQ(plan.smem_bytes, config.smem_bytes + c.stages * tiles);
    CHECK(plan.smem_bytes <= h200.max_smem_per_block);
  }
}

// By itself the plan takes it where its large blocks find an SM each, and has blocks stay for
// several works where those are short and many.
void automatic_choice() {
  const struct {
    std::int64_t batch_size, heads, seqlen;
    int head_dim;
    std::string_view kernel;
    std::int64_t grid;
    std::int64_t causal_grid = 0;  // where it differs
  } choices[] = {
      {1, 8, 512, 64, "wmma", 0},
      {1, 8, 2048, 64, "sm90", 128},  // short blocks
      {2, 8, 2048, 64, "sm90", 128, 256},
      {1, 8, 4096, 64, "sm90", 128, 256},
      {1, 32, 1024, 64, "sm90", 128, 256},
      {1, 8, 2048, 128, "sm90", 128},
      {1, 8, 512, 128, "wmma", 0},
      {1, 8, 1024, 128, "sm90", 64},
      {1, 8, 512, 256, "sm90", 32},
      {1, 8, 256, 256, "sm90", 16},
      // Blocks that are up to half full, and few keys.
      {8, 32, 64, 128, "wmma", 0},
      {8, 32, 128, 128, "sm90", 132, 256},
      {8, 32, 128, 64, "sm90", 132, 256},  // causal: of wmma
      {8, 32, 192, 64, "sm90", 132, 256},
      {4, 32, 64, 256, "sm90", 128},
      {8, 32, 64, 256, "wmma", 0},
      {4, 32, 4096, 64, "sm90", 2048},
      {32, 32, 512, 64, "sm90", 132},
      {16, 16, 1024, 128, "sm90", 132},
      {8, 32, 512, 128, "sm90", 132},
      {8, 16, 1024, 128, "sm90", 132, 1024},  // shares of 8 works, of 8 lengths
      {8, 16, 2048, 128, "sm90", 132, 1408},
      {16, 8, 1024, 256, "sm90", 132},  // even shares of eight lengths
      {16, 16, 1024, 256, "sm90", 132},
      {14, 8, 1024, 256, "sm90", 896},  // too few for them
      {18, 8, 1024, 256, "sm90", 132, 1152},
      {1, 32, 1024, 128, "sm90", 256},
      {4, 16, 4096, 128, "sm90", 1408},  // blocks of 192 rows
      {32, 8, 512, 256, "sm90", 132},
      {16, 8, 512, 256, "sm90", 512},
      {70000, 8, 4096, 128, "sm90", 12320000},
  };
  for (const auto& c : choices) {
    AttentionParams q = problem(DType::kFloat16, c.head_dim);
    q.batch_size = c.batch_size, q.num_heads = q.num_heads_kv = c.heads;
    q.seqlen_q = q.seqlen_k = c.seqlen;
    const std::string name = "heads " + std::to_string(c.heads) + ", seqlen " +
                             std::to_string(c.seqlen) + ", head_dim " + std::to_string(c.head_dim);
    const Plan plan = core::make_plan(q, h200, {});
    CHECK_FOR(plan.kernel == c.kernel, name);
    if (c.kernel == "sm90") {
      CHECK_FOR(plan.grid == c.grid, name);
      q.causal = Causal::kBottomRight;
      const std::int64_t grid = core::make_plan(q, h200, {}).grid;
      CHECK_FOR(grid == (c.causal_grid ? c.causal_grid : c.grid), name + ", causal");
    }
    CHECK(core::make_plan(q, gpus()[0], {}).kernel == "wmma");
  }
}

// Few rows or keys, and short walks.
void edges_of_the_choice() {
  AttentionParams few = problem(DType::kFloat16, 128);  // rows of queries, in blocks of 128
  few.batch_size = 64, few.seqlen_q = 64;
  CHECK(core::make_plan(few, h200, {}).kernel == "sm90");
  few.seqlen_q = 512, few.seqlen_k = 64;
  CHECK(core::make_plan(few, h200, {}).kernel == "sm90");
  CHECK_EQ(core::make_plan(few, h200, {}).grid, 132);  // blocks stay, however few their works
  few.seqlen_k = 256;
  CHECK_EQ(core::make_plan(few, h200, {}).grid, 132);
  few.batch_size = 9;  // works for two rounds and a half
  CHECK_EQ(core::make_plan(few, h200, {}).grid, 132);
  few.seqlen_k = 320;
  CHECK(core::make_plan(few, h200, {}).grid > 132);
  // A window makes walks short, so blocks stay for several of them.
  constexpr std::int64_t kAll = 22 * 8 * 16;  // blocks of 192 rows, heads, sequences
  AttentionParams narrow = problem(DType::kFloat16, 128);
  narrow.batch_size = 16, narrow.seqlen_q = narrow.seqlen_k = 4096,
  narrow.causal = Causal::kBottomRight;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, kAll);
  narrow.window_left = 1025;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, kAll);
  narrow.window_left = 1024;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, 132);
  narrow.window_left = 512;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, 132);
  narrow.causal = Causal::kNone;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, kAll);
  narrow.window_right = 100;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, 132);
  // Sides whose sum is more than 64 bits hold see as much as none.
  narrow.seqlen_q = narrow.seqlen_k = 2048;
  narrow.window_left = narrow.window_right = -1;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, 132);
  narrow.window_left = narrow.window_right = (std::int64_t{1} << 62) - 2;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, 132);
}

// Grids on which percentages of a full device took the slower one, measured on an H200
// (h200-choices.json): to 3.5 times as slow.
void choice_by_time() {
  const struct {
    std::int64_t heads, seqlen_q, seqlen_k;
    int head_dim;
    void (*set)(AttentionParams&);
    std::string_view kernel;
  } cases[] = {
      {1, 192, 192, 256, [](AttentionParams&) {}, "sm90"},    // 6.7 us, wmma 13.1
      {128, 64, 2048, 128, [](AttentionParams&) {}, "sm90"},  // 36.7, 57.2
      {2, 128, 128, 64, [](AttentionParams& p) { p.softcap = 20.0; }, "decode"},
      {8, 512, 512, 64, [](AttentionParams&) {}, "wmma"},  // a short sequence
      {32, 128, 128, 64, [](AttentionParams&) {}, "wmma"},
      {8, 2048, 64, 64, [](AttentionParams&) {}, "wmma"},  // 4.7, sm90 5.3
  };
  for (const auto& c : cases) {
    AttentionParams p = problem(DType::kFloat16, c.head_dim);
    p.batch_size = 1, p.num_heads = p.num_heads_kv = c.heads;
    p.q.row_stride = p.k.row_stride = p.v.row_stride = p.out.row_stride = c.heads * c.head_dim;
    p.seqlen_q = c.seqlen_q, p.seqlen_k = c.seqlen_k;
    c.set(p);
    const Plan plan = dlattn::plan(p, h200);
    CHECK_FOR(plan.kernel == c.kernel, std::to_string(c.heads) + " heads");
    CHECK(plan.predicted_ns > 2e3 && plan.predicted_ns < 1e5);
    // The one taken is predicted to be the fastest of those that serve the problem.
    for (const std::string_view name : kernel_names()) {
      if (name == "auto" || !supported(p, h200, force(name)).ok) continue;
      const Plan other = dlattn::plan(p, h200, force(name));
      CHECK(plan.margin * plan.predicted_ns <= other.margin * other.predicted_ns);
    }
  }
}

// Under causality all heads are walked together where L2 holds their keys.
void order_of_heads() {
  AttentionParams p = problem(DType::kFloat16, 64);
  p.batch_size = 1, p.num_heads = p.num_heads_kv = 32;
  CHECK(!core::make_plan(p, h200, {}).all_heads_together);  // all walks are alike
  p.causal = Causal::kBottomRight;
  CHECK(core::make_plan(p, h200, {}).all_heads_together);
  CHECK(!core::make_plan(p, h200, force("wmma")).all_heads_together);
  p.batch_size = 2;
  CHECK(core::make_plan(p, h200, {}).all_heads_together);
  p.batch_size = 3;
  CHECK(!core::make_plan(p, h200, {}).all_heads_together);
  p.num_heads_kv = 8;
  CHECK(core::make_plan(p, h200, {}).all_heads_together);
  static const std::int32_t offsets[2] = {};
  p.batch_size = 1, p.cu_seqlens_q = p.cu_seqlens_k = offsets, p.total_q = p.total_k = 2048;
  CHECK(!core::make_plan(p, h200, {}).all_heads_together);
}

// Where it does not, as many as leave room in it; few in persistent blocks.
void groups_of_heads() {
  AttentionParams p = problem(DType::kFloat16, 64);
  p.batch_size = 8, p.num_heads = p.num_heads_kv = 32, p.causal = Causal::kBottomRight;
  const struct {
    std::int64_t seqlen, heads_kv, together;
  } cases[] = {{1024, 32, 64},  {2048, 32, 32}, {4096, 32, 16}, {8192, 32, 8},
               {16384, 32, 8},  {32768, 32, 2}, {65536, 32, 1}, {4096, 8, 64},
               {1 << 20, 1, 2}, {600, 32, 256}, {2048, 4, 256}, {3000, 32, 16}};
  for (const auto& c : cases) {
    p.seqlen_q = p.seqlen_k = c.seqlen, p.num_heads_kv = c.heads_kv;
    CHECK_EQ(sm90::heads_together(p, 128, false), c.together);
  }
  p.batch_size = 1, p.seqlen_q = p.seqlen_k = 32768, p.num_heads_kv = p.num_heads = 7;
  CHECK_EQ(sm90::heads_together(p, 256, false), 8);  // 896 blocks
  p.num_heads_kv = p.num_heads = 8;
  CHECK_EQ(sm90::heads_together(p, 256, false), 2);
  p.batch_size = 0, p.seqlen_k = std::int64_t{1} << 40;
  CHECK_EQ(sm90::heads_together(p, 256, false), 8);
  p.batch_size = 8, p.num_heads = 32;
  p.seqlen_q = p.seqlen_k = 2048, p.num_heads_kv = 32;
  CHECK_EQ(sm90::heads_together(p, 192, true), 8);
  CHECK_EQ(sm90::heads_together(p, 256, true), 4);
  p.batch_size = 32;
  for (const std::int64_t head_dim : {64, 128, 136, 256}) {
    p.head_dim = p.head_dim_v = head_dim, p.seqlen_q = p.seqlen_k = 512;
    CHECK_EQ(sm90::heads_together(p, 128, true), head_dim > 128 ? 4 : 8);
    CHECK_EQ(sm90::heads_together(p, 64, true), head_dim > 128 ? 12 : 4);
    CHECK_EQ(sm90::heads_together(p, 192, true), 8);
  }
  p.batch_size = 8, p.head_dim = p.head_dim_v = 64, p.seqlen_q = p.seqlen_k = 2048;
  p.softcap = 30.0;
  CHECK_EQ(sm90::heads_together(p, 256, false), 8);
  CHECK_EQ(sm90::heads_together(p, 256, true), 8);
  p.softcap = 0.0;
  // There persistent blocks serve walks of 2048 keys too.
  CHECK_EQ(core::make_plan(p, h200, force("sm90")).grid, 132);
  p.seqlen_q = p.seqlen_k = 1536;
  CHECK_EQ(core::make_plan(p, h200, force("sm90")).grid, 8 * 32 * 6);
  p.causal = Causal::kNone;
  CHECK_EQ(sm90::heads_together(p, 256, false), 8);
  // Full groups, then the heads that are left; a group is never larger than there are heads.
  const HeadGroups groups = make_head_groups(70, 32);
  CHECK_EQ(groups.together.divisor(), 32u);
  CHECK_EQ(groups.in_groups, 64u);
  CHECK_EQ(groups.left.divisor(), 6u);
  const HeadGroups all = make_head_groups(5, 8);
  CHECK_EQ(all.together.divisor(), 5u);
  CHECK_EQ(all.in_groups, 5u);
  CHECK_EQ(make_head_groups(0, 8).together.divisor(), 1u);
}

// Plain scores may take blocks of fewer rows, for grids of few or of uneven blocks.
void short_blocks() {
  const auto of = [](const char* variant) {
    Options options = force("sm90");
    options.variant = variant;
    return options;
  };
  for (const int head_dim : {64, 96, 128}) {
    AttentionParams p = problem(DType::kFloat16, head_dim);
    p.batch_size = 1, p.causal = Causal::kBottomRight;
    CHECK(std::string(dlattn::plan(p, h200).variant_name) == "short");
    const Plan by_name = dlattn::plan(p, h200, of("short"));
    CHECK(std::string(by_name.variant_name) == "short");
    CHECK_EQ(by_name.block_m, 128);
    const Plan tall = dlattn::plan(p, h200, of("tall"));
    CHECK(std::string(tall.variant_name) == "tall");
    CHECK_EQ(tall.block_m, head_dim == 64 ? 256 : 192);
    // Those of varlen sequences are tall, and with batch_invariant so are all.
    Options invariant;
    invariant.batch_invariant = true;
    CHECK(std::string(dlattn::plan(p, h200, invariant).variant_name) == "tall");
    p.batch_size = 128;
    CHECK(std::string(dlattn::plan(p, h200).variant_name) == "tall");
  }
  static const std::int32_t offsets[2] = {};
  const struct {
    void (*change)(AttentionParams&, Options&);
    const char* why;
  } cases[] = {
      {[](AttentionParams& p, Options&) { p.softcap = 30.0; }, "score terms"},
      {[](AttentionParams& p, Options&) { p.mask.data = bools, p.mask.col_stride = 1; },
       "score terms"},
      {[](AttentionParams& p, Options&) { p.cu_seqlens_q = p.cu_seqlens_k = offsets; },
       "cu_seqlens_q"},
      {[](AttentionParams& p, Options&) { p.head_dim = 192; }, "head dims above 128"},
      {[](AttentionParams&, Options& options) { options.batch_invariant = true; },
       "batch_invariant"},
  };
  for (const auto& c : cases) {
    AttentionParams p = problem(DType::kFloat16, 64);
    Options options = of("short");
    c.change(p, options);
    CHECK_THROWS(
        dlattn::plan(p, h200, options), UnsupportedError,
        std::string("no kernel can run this: sm90: variant short does not implement ") + c.why);
    options.variant = "tall";
    CHECK(supported(p, h200, options).ok);
  }
  // Tall blocks have variants with the problem's score modifications.
  AttentionParams capped = problem(DType::kFloat16, 64);
  capped.softcap = 30.0;
  CHECK(std::string(dlattn::plan(capped, h200, of("softcap_alibi")).variant_name) ==
        "softcap_alibi");
  CHECK_THROWS(dlattn::plan(capped, h200, of("bias_mask")), UnsupportedError,
               "no kernel can run this: sm90: variant bias_mask is not for this problem's scores; "
               "accepted: softcap_alibi");
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 64), h200, of("softcap_alibi")),
               UnsupportedError,
               "no kernel can run this: sm90: variant softcap_alibi is not for this problem's "
               "scores; accepted: tall");
  CHECK_THROWS(
      dlattn::plan(problem(DType::kFloat16, 64), h200, of("wide")), UnsupportedError,
      "no kernel can run this: sm90: variant is wide; accepted: tall, softcap_alibi, bias_mask, "
      "short, pairs");
}

// At the largest head dims blocks may be in pairs, which walk the same keys.
void pairs_of_blocks() {
  Options pairs = force("sm90");
  pairs.variant = "pairs";
  AttentionParams p = problem(DType::kBFloat16, 256);
  p.batch_size = 8;  // 1,024 tiles of rows
  const Plan plan = dlattn::plan(p, h200);
  CHECK(plan.kernel == "sm90" && std::string(plan.variant_name) == "pairs");
  CHECK_EQ(plan.cluster_size, 2);
  CHECK_EQ(plan.grid, 132);
  DeviceInfo odd = h200;
  odd.num_sms = 131;
  CHECK_EQ(dlattn::plan(p, odd, pairs).grid, 130);
  p.seqlen_k = 4096;
  CHECK_EQ(dlattn::plan(p, odd, pairs).grid, 130);
  p.seqlen_k = 4097;
  CHECK_EQ(dlattn::plan(p, odd, pairs).grid, 1024);
  Options tall = force("sm90");
  tall.variant = "tall";
  CHECK_EQ(dlattn::plan(p, h200, tall).cluster_size, 1);
  p.seqlen_k = 256;  // too short to pay for what a pair waits for
  CHECK(std::string(dlattn::plan(p, h200).variant_name) == "tall");
  Options invariant = pairs;
  invariant.batch_invariant = true;
  CHECK_THROWS(dlattn::plan(p, h200, invariant), UnsupportedError,
               "no kernel can run this: sm90: variant pairs does not implement batch_invariant");
  static const std::int32_t offsets[2] = {};
  const struct {
    void (*change)(AttentionParams&);
    const char* why;
  } cases[] = {
      {[](AttentionParams& p) { p.softcap = 30.0; }, "score terms"},
      {[](AttentionParams& p) { p.cu_seqlens_q = p.cu_seqlens_k = offsets; }, "cu_seqlens_q"},
      {[](AttentionParams& p) { p.head_dim = p.head_dim_v = 192; }, "head dims up to 192"},
      {[](AttentionParams& p) { p.causal = Causal::kTopLeft; }, "causal"},
      {[](AttentionParams& p) { p.window_left = 100; }, "a window"},
      {[](AttentionParams& p) { p.window_right = 100; }, "a window"},
      {[](AttentionParams& p) { p.seqlen_q = 1920; }, "an odd number of tiles of rows"},
  };
  for (const auto& c : cases) {
    AttentionParams changed = problem(DType::kBFloat16, 256);
    c.change(changed);
    CHECK_THROWS(
        dlattn::plan(changed, h200, pairs), UnsupportedError,
        std::string("no kernel can run this: sm90: variant pairs does not implement ") + c.why);
    CHECK(std::string(dlattn::plan(changed, h200, force("sm90")).variant_name) != "pairs");
  }
}

// Varlen batches with a bias or a mask are not the family's: with batch_invariant, batches go where
// varlen batches do.
void batch_invariance() {
  Options invariant;
  invariant.batch_invariant = true;
  AttentionParams p = problem(DType::kFloat16, 128);
  p.batch_size = 64;
  CHECK(dlattn::plan(p, h200, invariant).kernel == "sm90");
  for (const bool masked : {false, true}) {
    AttentionParams q = p;
    if (masked) q.mask.data = bools, q.mask.col_stride = 1;
    if (!masked) q.bias.data = numbers, q.bias.dtype = DType::kFloat32, q.bias.col_stride = 1;
    CHECK(dlattn::plan(q, h200).kernel == "sm90");
    CHECK(dlattn::plan(q, h200, invariant).kernel == "wmma");
    Options by_name = force("sm90");
    by_name.batch_invariant = true;
    const double ns = dlattn::plan(q, h200, by_name).predicted_ns;
    CHECK(ns > 0.0 && ns < 1e9);
  }
}

// Varlen batches: what decides is the tokens, not the longest sequence.
void varlen() {
  static const std::int32_t offsets[2] = {};
  const auto batch = [](std::int64_t sequences, std::int64_t tokens, std::int64_t longest,
                        int head_dim) {
    AttentionParams p = problem(DType::kFloat16, head_dim);
    p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = p.out.batch_stride = 3;  // ignored
    p.cu_seqlens_q = p.cu_seqlens_k = offsets;
    p.batch_size = sequences, p.total_q = p.total_k = tokens, p.seqlen_q = p.seqlen_k = longest;
    return p;
  };
  const struct {
    std::int64_t sequences, tokens, longest;
    int head_dim;
    std::string_view kernel;
    std::int64_t grid;
  } choices[] = {
      {64, 131584, 4096, 128, "sm90", (131584 / 192 + 64) * 8},
      {64, 131584, 4096, 64, "sm90", (131584 / 256 + 64) * 8},
      {1000, 1000, 1, 128, "wmma", 0},  // decode's blocks would look for 30 sequences each
      {1000, 1000 + 8192, 8192, 128, "sm90", (9192 / 192 + 1000) * 8},
      {100, 100 * 64, 64, 128, "wmma", 0},
      {100, 100 * 64, 4096, 128, "sm90", (6400 / 192 + 100) * 8},  // wmma would have empty blocks
      {100, 100 * 65, 4096, 128, "sm90", (6500 / 192 + 100) * 8},
      {256, 256 * 300, 1000, 128, "sm90", 132},
      {1, 0, 0, 128, "wmma", 0},
  };
  for (const auto& c : choices) {
    const Plan plan = dlattn::plan(batch(c.sequences, c.tokens, c.longest, c.head_dim), h200);
    const std::string name = std::to_string(c.sequences) + " sequences, " +
                             std::to_string(c.tokens) + " tokens, head_dim " +
                             std::to_string(c.head_dim);
    CHECK_FOR(plan.kernel == c.kernel, name);
    if (c.kernel == "sm90") CHECK_FOR(plan.grid == c.grid, name);
  }
  // A varlen batch's tensor maps hold shorter steps than a batch's.
  AttentionParams p = batch(2, 4096, 4096, 128);
  p.v.row_stride = std::int64_t{1} << 33;
  CHECK_THROWS(dlattn::plan(p, h200, force("sm90")), UnsupportedError,
               "no kernel can run this: sm90: v has a row stride of 17179869184 bytes; accepted: "
               "multiples of 16 from 0 to 17179869168");
  p.v.row_stride = 0;
  CHECK(supported(p, h200, force("sm90")).ok);
}

}  // namespace

int main() {
  served();
  refused();
  score_terms();
  automatic_choice();
  edges_of_the_choice();
  choice_by_time();
  short_blocks();
  pairs_of_blocks();
  order_of_heads();
  groups_of_heads();
  batch_invariance();
  varlen();
  return test::summary();
}
