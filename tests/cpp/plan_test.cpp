// Plans for made-up GPUs, the registry's tiles, and which architectures a build serves. Needs no
// GPU and no CUDA.
#include "core/plan.h"

#include <algorithm>

#include "check.h"
#include "core/registry.h"
#include "cuda/scalar/traits.h"
#include "cuda/sm90/traits.h"
#include "cuda/wmma/packing.h"
#include "cuda/wmma/traits.h"
#include "cuda/wmma_qk/traits.h"
#include "cuda/wmma_smem/traits.h"
#include "devices.h"
#include "dlattn/attention.h"

using namespace dlattn;
using test::gpu;

namespace {

std::vector<DeviceInfo> gpus() {
  return {gpu("L4", 8, 9, 58, 101376), gpu("RTX 4090", 8, 9, 128, 101376),
          gpu("A100", 8, 0, 108, 166912), gpu("H200", 9, 0, 132, 232448)};
}

alignas(16) char memory[4096];

// Shape (2, 2048, 8, head_dim), contiguous bshd, at 16-byte aligned addresses.
AttentionParams problem(DType dtype, std::int64_t head_dim) {
  AttentionParams p;
  p.device = {DeviceType::kCuda, 0};
  p.q = memory, p.k = memory + 1024, p.v = memory + 2048, p.out = memory + 3072;
  p.dtype = dtype;
  p.batch_size = 2, p.seqlen_q = p.seqlen_k = 2048, p.num_heads = p.num_heads_kv = 8;
  p.head_dim = p.head_dim_v = head_dim;
  const std::int64_t row = 8 * head_dim;
  p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = p.out_batch_stride = 2048 * row;
  p.q_row_stride = p.k_row_stride = p.v_row_stride = p.out_row_stride = row;
  p.q_head_stride = p.k_head_stride = p.v_head_stride = p.out_head_stride = head_dim;
  p.softmax_scale = 0.125;
  return p;
}

Options force(Kernel kernel) {
  Options options;
  options.kernel = kernel;
  return options;
}

// Leaves the choice to the plan, but for devices that sm90 is made for.
Options below_sm90(const DeviceInfo& device) {
  return device.compute_major == 9 ? force(Kernel::kWmma) : Options{};
}

constexpr DType kHalves[] = {DType::kFloat16, DType::kBFloat16};

void automatic_choice() {
  for (const DeviceInfo& device : gpus()) {
    for (const DType dtype : kHalves) {
      for (const int head_dim : {8, 32, 40, 64, 72, 96, 112, 128, 136, 192, 200, 256}) {
        const AttentionParams p = problem(dtype, head_dim);
        const Plan plan = dlattn::plan(p, device, below_sm90(device));
        CHECK(plan.kernel == Kernel::kWmma);
        CHECK(plan.dtype == dtype);
        const int tile = head_dim <= 32    ? 32
                         : head_dim <= 64  ? 64
                         : head_dim <= 96  ? 96
                         : head_dim <= 128 ? 128
                         : head_dim <= 192 ? 192
                                           : 256;
        CHECK_EQ(plan.head_dim_tile, tile);
        const TileConfig config = wmma::tile_config(tile, plan.variant);
        CHECK_EQ(plan.block_m, config.block_m);
        CHECK_EQ(plan.block_n, config.block_n);
        CHECK_EQ(plan.num_warps, config.num_warps);
        CHECK_EQ(plan.num_stages, config.num_stages);
        CHECK_EQ(plan.smem_bytes, config.smem_bytes);
        CHECK_EQ(plan.grid, 2048 / config.block_m * 8 * 2);
        CHECK_EQ(plan.copy_bytes, 16);
        CHECK_EQ(plan.num_splits, 1);
        CHECK_EQ(plan.workspace_bytes, 0);
        CHECK(supported(p, device).ok);
      }
      // The general kernel serves the head dims between.
      for (const int head_dim : {1, 20, 65, 90, 130, 250}) {
        const Plan plan = dlattn::plan(problem(dtype, head_dim), device);
        CHECK(plan.kernel == Kernel::kWmma);
        CHECK_EQ(plan.variant, wmma::kGeneral);
        const int tile = head_dim <= 32    ? 32
                         : head_dim <= 64  ? 64
                         : head_dim <= 96  ? 96
                         : head_dim <= 128 ? 128
                         : head_dim <= 192 ? 192
                                           : 256;
        CHECK_EQ(plan.head_dim_tile, tile);
        CHECK_EQ(plan.smem_bytes, wmma::general_smem_bytes(tile, false, 0));
      }
    }
    const Plan fp32 = dlattn::plan(problem(DType::kFloat32, 64), device);
    CHECK(fp32.kernel == Kernel::kScalar);
    CHECK_EQ(fp32.smem_bytes, scalar::tile_config(4, 64).smem_bytes);
    // The larger of the two head dims chooses the tile.
    AttentionParams p = problem(DType::kFloat16, 64);
    p.head_dim_v = 112;
    p.out_head_stride = 112, p.out_row_stride = 8 * 112, p.out_batch_stride = 2048 * 8 * 112;
    CHECK_EQ(dlattn::plan(p, device).head_dim_tile, 128);
  }
}

// Every instance fits the 99 KB of the smallest device.
void shared_memory_of_every_instance() {
  for (const int tile : {64, 128, 256}) {
    for (const int bytes : {2, 4}) CHECK(scalar::tile_config(bytes, tile).smem_bytes <= 101376);
  }
  for (const int tile : {32, 64, 96, 128}) {
    CHECK(wmma_qk::tile_config(tile).smem_bytes <= 101376);
    CHECK(wmma_smem::tile_config(tile).smem_bytes <= 101376);
  }
  for (const int tile : {32, 64, 96, 128, 192, 256}) {
    for (int variant = 0; variant < wmma::kNumVariants; ++variant) {
      if (!wmma::has_variant(tile, variant)) continue;
      // Whole is for devices with more, of which compute capability 8.0 has least.
      const int most = variant == wmma::kWhole ? 166912 : variant == wmma::kTurns ? 232448 : 101376;
      CHECK(wmma::tile_config(tile, variant).smem_bytes <= most);
    }
  }
}

// The tile shapes of wmma that its cost model chooses.
void tile_shapes() {
  constexpr int kW = wmma::kWide, kN = wmma::kNarrow, kS = wmma::kSplit, kA = wmma::kAhead,
                kAll = wmma::kWhole;
  const struct {
    std::int64_t batch_size, heads, seqlen;
    int head_dim;
    bool causal;
    int l4, rtx4090, a100, h200;
  } cases[] = {
      // Few rows: keys are divided among the warps where blocks of few rows find an SM each.
      {1, 8, 96, 64, false, kS, kS, kS, kS},
      {1, 8, 128, 128, false, kS, kS, kS, kS},
      // All keys at once where the blocks have an SM each, with that much shared memory.
      {1, 8, 128, 64, false, kS, kS, kAll, kAll},
      {1, 8, 256, 64, false, kN, kS, kAll, kAll},
      {1, 4, 512, 64, false, kN, kS, kAll, kAll},
      {1, 8, 512, 64, false, kN, kS, kS, kAll},
      {1, 8, 512, 64, true, kN, kS, kS, kAll},
      {1, 32, 256, 64, false, kN, kN, kN, kS},
      {1, 8, 512, 128, false, kN, kS, kN, kS},
      {1, 32, 256, 128, false, kN, kN, kN, kN},
      {1, 8, 1024, 64, true, kN, kS, kS, kS},
      // Blocks enough for every SM, not for several rounds: causality leaves the long ones alone.
      {1, 8, 2048, 64, false, kN, kN, kN, kN},
      {1, 8, 4096, 64, false, kN, kW, kN, kW},
      {1, 8, 4096, 64, true, kN, kN, kN, kN},
      {1, 8, 4096, 128, false, kN, kN, kN, kW},
      {1, 32, 1024, 128, true, kN, kN, kN, kN},
      // Many rows. Two wide blocks of head_dim 128 need 194 KB of an SM.
      {32, 32, 512, 64, false, kW, kW, kW, kW},
      {4, 32, 4096, 64, true, kW, kW, kW, kW},
      {4, 16, 4096, 128, false, kN, kN, kN, kW},
      {4, 16, 4096, 128, true, kN, kN, kN, kW},
      // Registers leave one wide block of head_dim 256 to an SM.
      {1, 8, 1024, 256, false, kN, kN, kN, kN},
      {4, 8, 4096, 256, false, kW, kW, kN, kA},
      {4, 8, 4096, 192, true, kN, kN, kN, kA},
  };
  const std::vector<DeviceInfo> devices = gpus();
  for (const auto& c : cases) {
    AttentionParams p = problem(DType::kFloat16, c.head_dim);
    p.batch_size = c.batch_size, p.seqlen_q = p.seqlen_k = c.seqlen;
    p.num_heads = p.num_heads_kv = c.heads;
    p.out_row_stride = c.heads * c.head_dim;
    p.out_batch_stride = c.seqlen * p.out_row_stride;
    p.causal = c.causal ? Causal::kBottomRight : Causal::kNone;
    const int expected[] = {c.l4, c.rtx4090, c.a100, c.h200};
    for (int i = 0; i < 4; ++i) {
      const Plan plan = dlattn::plan(p, devices[i], force(Kernel::kWmma));
      CHECK_FOR(plan.variant == expected[i],
                devices[i].name + " head_dim " + std::to_string(c.head_dim) + " seqlen " +
                    std::to_string(c.seqlen) + ": " + plan.variant_name);
    }
  }
  // Packed sequences count by their tokens, not by the longest: few of them leave SMs idle.
  AttentionParams packed = problem(DType::kFloat16, 64);
  const std::int32_t starts[] = {0, 1, 2};
  packed.cu_seqlens_q = packed.cu_seqlens_k = starts;
  packed.seqlen_q = packed.seqlen_k = 2048;
  packed.total_q = packed.total_k = 64;
  CHECK_EQ(dlattn::plan(packed, devices[3]).variant, kS);
  packed.total_q = packed.total_k = 4096;
  CHECK(dlattn::plan(packed, devices[3]).variant != kS);
}

void forced_variants() {
  const DeviceInfo device = gpus()[0];
  AttentionParams p = problem(DType::kFloat16, 64);
  Options options = force(Kernel::kWmma);
  for (int variant = 0; variant < wmma::kNumVariants; ++variant) {
    if (!wmma::has_variant(64, variant) || variant == wmma::kWhole) continue;
    options.variant = wmma::kVariantNames[variant];
    const Plan plan = dlattn::plan(p, device, options);
    CHECK_EQ(plan.variant, variant);
    CHECK(std::string(plan.variant_name) == wmma::kVariantNames[variant]);
    CHECK_EQ(plan.block_m, wmma::tile_config(64, variant).block_m);
    CHECK(describe(plan).find(std::string("kernel: wmma:") + plan.variant_name) == 0);
    // The general kernel alone has score terms, odd head dims and narrow copies.
    if (variant == wmma::kGeneral) continue;
    const std::string name = std::string("wmma: variant ") + plan.variant_name;
    const auto refused = [&](auto change, const char* why) {
      AttentionParams odd = p;
      change(odd);
      CHECK_EQ(dlattn::plan(odd, device).variant, wmma::kGeneral);
      CHECK_THROWS(dlattn::plan(odd, device, options), UnsupportedError,
                   "no kernel can run this: " + name + why);
    };
    refused([](auto& odd) { odd.softcap = 2.0; }, ": does not implement softcap");
    refused([](auto& odd) { odd.head_dim = 36; }, ": head_dim is 36; accepted: multiples of 8");
    refused([](auto& odd) { odd.head_dim_v = 20; },
            ": head_dim of v is 20; accepted: multiples of 8");
    refused([](auto& odd) { odd.v = memory + 4; },
            ": rows of q, k and v are aligned to 4 bytes; accepted: 16");
  }
  // Whole needs room for all keys.
  options.variant = "whole";
  CHECK_THROWS(
      dlattn::plan(p, gpus()[3], options), UnsupportedError,
      "no kernel can run this: wmma: variant whole: seqlen_k is 2048; accepted: up to 512");
  p.seqlen_q = p.seqlen_k = 512;
  CHECK_EQ(dlattn::plan(p, gpus()[3], options).smem_bytes, 136192);
  CHECK_THROWS(dlattn::plan(p, device, options), UnsupportedError,
               "no kernel can run this: wmma: needs 136192 bytes of shared memory per block; " +
                   device.name + " has 101376");
  const std::int32_t starts[] = {0, 1, 2};
  p.cu_seqlens_q = p.cu_seqlens_k = starts, p.total_q = p.total_k = 2;
  CHECK_THROWS(dlattn::plan(p, gpus()[3], options), UnsupportedError,
               "no kernel can run this: wmma: variant whole: does not implement cu_seqlens_q");
  p = problem(DType::kFloat16, 64);
  // Split counts offsets in 32 bits.
  AttentionParams far = p;
  far.k_row_stride = std::int64_t{1} << 32;
  options.variant = "split";
  CHECK_THROWS(dlattn::plan(far, device, options), UnsupportedError,
               "no kernel can run this: wmma: variant split: q, k or v spans 32 GiB or more; "
               "accepted: less");
  far.k_row_stride = p.k_row_stride, far.seqlen_q = far.seqlen_k = 96;
  CHECK_EQ(dlattn::plan(far, gpus()[3], force(Kernel::kWmma)).variant, wmma::kSplit);
  far.v_head_stride = std::int64_t{1} << 35;
  CHECK(dlattn::plan(far, gpus()[3], force(Kernel::kWmma)).variant != wmma::kSplit);
  options.variant = "huge";
  const Support unknown = supported(p, device, options);
  CHECK(!unknown.ok);
  CHECK(unknown.reasons.at(0).find("wmma: variant is huge; accepted: wide, narrow") == 0);
  options.kernel = Kernel::kScalar, options.variant = "narrow";
  CHECK_THROWS(dlattn::plan(p, device, options), UnsupportedError,
               "no kernel can run this: scalar: variant is narrow; accepted: none, this kernel has "
               "one tile shape");
  options.kernel = Kernel::kAuto;  // the only family that has it
  CHECK(dlattn::plan(p, device, options).kernel == Kernel::kWmma);
}

// A decoding step: one query, 32 heads of q and 8 of k and v.
AttentionParams decode_problem(std::int64_t batch_size, std::int64_t head_dim) {
  AttentionParams p = problem(DType::kFloat16, head_dim);
  p.batch_size = batch_size, p.num_heads = 32, p.num_heads_kv = 8;
  p.seqlen_q = 1, p.seqlen_k = 4096, p.causal = Causal::kBottomRight;
  p.q_row_stride = p.out_row_stride = 32 * head_dim;
  p.q_batch_stride = p.out_batch_stride = p.q_row_stride;
  return p;
}

// Query heads of one KV head as rows of the same tiles.
void packed_heads() {
  static float numbers[64] = {};
  const auto request = [](const char* variant) {
    Options options;
    options.kernel = Kernel::kWmma, options.variant = variant;
    return options;
  };
  for (const DeviceInfo& device : gpus()) {
    const AttentionParams p = decode_problem(16, 128);
    const Plan packed = dlattn::plan(p, device),
               unpacked = dlattn::plan(p, device, request("unpacked"));
    CHECK_EQ(packed.packed_heads, 4);
    CHECK_EQ(packed.grid, 16 * 8);  // a block each, for its rows are 4
    CHECK_EQ(unpacked.packed_heads, 1);
    CHECK_EQ(unpacked.grid, 16 * 32);
    CHECK(describe(packed).find(", rows of 4 heads\n") != std::string::npos);
    CHECK(describe(unpacked).find("heads") == std::string::npos);
    // Every tile shape can be told to.
    for (const char* variant : {"wide+packed", "narrow+packed", "split+packed", "general+packed"}) {
      const Plan plan = dlattn::plan(p, device, request(variant));
      CHECK_EQ(plan.packed_heads, 4);
      CHECK(std::string(variant).find(plan.variant_name) == 0);
      CHECK_EQ(plan.grid, 16 * 8);
    }
    CHECK_EQ(dlattn::plan(p, device, request("narrow+unpacked")).packed_heads, 1);
    // The general kernel packs where strides alone can say it.
    AttentionParams general = p;
    general.softcap = 30.0;
    CHECK_EQ(dlattn::plan(general, device).packed_heads, 4);
    general.alibi_slopes = numbers;
    CHECK_EQ(dlattn::plan(general, device).packed_heads, 1);
    // A few queries, as when a draft is verified: a tile takes them all.
    AttentionParams other = p;
    other.seqlen_q = 8, other.out_batch_stride *= 8;
    CHECK_EQ(dlattn::plan(other, device).packed_heads, 4);
    CHECK_EQ(dlattn::plan(other, device).grid, 16 * 8);
    // Sinks, which single queries on the general kernel stop at, and packed sequences.
    other.sinks = numbers;
    CHECK_EQ(dlattn::plan(other, device).packed_heads, 4);
    static const std::int32_t offsets[17] = {};
    other.cu_seqlens_q = other.cu_seqlens_k = offsets;
    other.total_q = 16 * 8, other.total_k = 16 * 4096;
    CHECK_EQ(dlattn::plan(other, device).packed_heads, 4);
    // Nothing to pack, and nothing to gain from it.
    other = p, other.num_heads = 8;
    CHECK_EQ(dlattn::plan(other, device).packed_heads, 1);
    other = p, other.seqlen_q = 4096, other.out_batch_stride *= 4096;
    CHECK_EQ(dlattn::plan(other, device).packed_heads, 1);
    // Neither does it depend on lengths if bits must not.
    Options invariant;
    invariant.batch_invariant = true;
    CHECK_EQ(dlattn::plan(p, device, invariant).packed_heads, 1);
  }
  AttentionParams alone = decode_problem(16, 128);
  alone.num_heads = 8;
  CHECK_THROWS(dlattn::plan(alone, gpus()[0], request("packed")), UnsupportedError,
               "no kernel can run this: wmma: packed: every query head has a head of k and v to "
               "itself");
  AttentionParams drafted = decode_problem(16, 128);
  drafted.seqlen_q = 8, drafted.out_batch_stride *= 8, drafted.softcap = 30.0;
  CHECK_EQ(dlattn::plan(drafted, gpus()[0]).packed_heads, 1);
  CHECK_THROWS(dlattn::plan(drafted, gpus()[0], request("packed")), UnsupportedError,
               "no kernel can run this: wmma: packed: variant general packs heads of one query "
               "(seqlen_q = 1) in problems of fixed length, without sinks and alibi_slopes");
  AttentionParams huge = decode_problem(16, 128);
  huge.seqlen_q = std::int64_t{1} << 29, huge.out_batch_stride *= huge.seqlen_q;
  CHECK_THROWS(dlattn::plan(huge, gpus()[0], request("packed")), UnsupportedError,
               "no kernel can run this: wmma: packed: seqlen_q x heads of a group is 2147483648; "
               "accepted: up to 1073740800");
  for (const char* wrong : {"", "+packed", "packed+split", "split+", "split+packed+packed"}) {
    CHECK_THROWS(dlattn::plan(alone, gpus()[0], request(wrong)), UnsupportedError,
                 std::string("no kernel can run this: wmma: variant is ") + wrong +
                     "; accepted: wide, narrow, split, ahead, general, whole, packed, unpacked, or "
                     "one of each as in narrow+packed");
  }
}

// What kernels are told of a problem whose heads are packed.
void packed_launches() {
  const DeviceInfo device = gpus()[0];
  const auto launched = [&](const AttentionParams& p, const char* variant, auto check) {
    Options options = force(Kernel::kWmma);
    options.variant = variant;
    wmma::as_launched(p, dlattn::plan(p, device, options), check);
  };
  AttentionParams p = decode_problem(2, 64);
  p.num_heads_kv = 1, p.seqlen_q = 3, p.out_batch_stride *= 3;
  p.out_head_stride = 65, p.out_row_stride = 32 * 72, p.out_batch_stride = 3 * p.out_row_stride;
  p.lse_head_stride = 3, p.sinks_stride = 2;
  launched(p, "narrow+packed", [](const AttentionParams& to, const LaunchShape& shape) {
    CHECK_EQ(to.num_heads, 32);
    CHECK_EQ(shape.num_heads.divisor(), 1u);
    CHECK_EQ(shape.num_m_blocks.divisor(), 2u);  // 96 rows
    CHECK_EQ(shape.packed_heads.divisor(), 32u);
    CHECK_EQ(shape.store_bytes, 2);  // one head of K and V, but 32 of out
  });
  // Windows become keys of a single query: those it sees are all there are.
  p = decode_problem(2, 64);
  p.window_left = 9;
  const AttentionParams folded = wmma::folded_heads(p);
  CHECK_EQ(folded.seqlen_q, 4);
  CHECK_EQ(folded.num_heads, 8);
  CHECK_EQ(folded.seqlen_k, 10);
  CHECK(folded.k == static_cast<const char*>(p.k) + 4086 * p.k_row_stride * 2);
  CHECK(folded.v == static_cast<const char*>(p.v) + 4086 * p.v_row_stride * 2);
  CHECK(folded.causal == Causal::kNone && folded.window_left < 0 && folded.window_right < 0);
  p.causal = Causal::kTopLeft;
  CHECK_EQ(wmma::folded_heads(p).seqlen_k, 1);
  CHECK(wmma::folded_heads(p).k == p.k);
}

void sm90_plans() {
  const DeviceInfo h200 = gpus()[3];
  for (const DeviceInfo& device : gpus()) {
    const Support support = supported(problem(DType::kFloat16, 64), device, force(Kernel::kSm90));
    CHECK_EQ(support.ok, device.compute_major == 9);
    if (device.compute_major == 9) continue;
    CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 64), device, force(Kernel::kSm90)),
                 UnsupportedError,
                 "no kernel can run this: sm90: needs compute capability 9.0; " + device.name +
                     " has 8." + std::to_string(device.compute_minor));
  }
  DeviceInfo without = h200;
  without.sm90_unserved = "needs kernels for 90a; this build has kernels for 89-real";
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 64), without, force(Kernel::kSm90)),
               UnsupportedError,
               "no kernel can run this: sm90: needs kernels for 90a; this build has kernels for "
               "89-real");
  AttentionParams large = problem(DType::kFloat16, 128);
  large.batch_size = 64;
  CHECK(dlattn::plan(large, h200).kernel == Kernel::kSm90);
  CHECK(dlattn::plan(large, without).kernel == Kernel::kWmma);
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
    const Plan plan = dlattn::plan(p, h200, force(Kernel::kSm90));
    CHECK(plan.kernel == Kernel::kSm90);
    CHECK_EQ(plan.head_dim_tile, d.tile);
    const TileConfig config = sm90::tile_config(d.tile, d.tile_v);
    CHECK_EQ(plan.block_m, config.block_m);
    CHECK_EQ(plan.block_n, config.block_n);
    CHECK_EQ(plan.num_warps, config.num_warps);
    CHECK_EQ(plan.smem_bytes, config.smem_bytes);
    CHECK(plan.smem_bytes <= h200.max_smem_per_block);
    CHECK(plan.grid > 0 && plan.grid <= 2048 / config.block_m * 8 * 2);
  }
  alignas(16) static const float numbers[64] = {};
  alignas(16) static const std::uint8_t bools[64] = {};
  static const std::int32_t offsets[3] = {0, 1, 2};
  const struct {
    void (*change)(AttentionParams&);
    const char* why;
  } refused[] = {
      {[](AttentionParams& p) { p.bias = numbers; },
       "bias has a column stride of 0 elements; accepted: 1"},
      {[](AttentionParams& p) { p.mask = bools, p.mask_col_stride = 2048; },
       "mask has a column stride of 2048 elements; accepted: 1"},
      {[](AttentionParams& p) {
         p.bias = numbers, p.bias_col_stride = 1, p.bias_row_stride = 2046;
       },
       "bias has a row stride of 8184 bytes; accepted: multiples of 16 from 0 to 1099511627760"},
      {[](AttentionParams& p) { p.mask = bools, p.mask_col_stride = 1, p.mask_head_stride = 8; },
       "mask has a head stride of 8 bytes; accepted: multiples of 16 from 0 to 1099511627760"},
      {[](AttentionParams& p) {
         p.head_dim = 256, p.bias = numbers, p.bias_col_stride = 1, p.mask = bools;
         p.mask_col_stride = 1;
       },
       "needs 238592 bytes of shared memory per block; H200 has 232448"},
      {[](AttentionParams& p) {
         p.cu_seqlens_q = p.cu_seqlens_k = offsets, p.total_q = p.total_k = 2;
         p.mask = bools, p.mask_col_stride = 1;
       },
       "does not implement mask with cu_seqlens_q"},
      {[](AttentionParams& p) { p.softcap = 1e5; },
       "softcap / softmax_scale is 800000; accepted: 1.52588e-05 to 65536"},
      {[](AttentionParams& p) { p.softcap = 1e-6; },
       "softcap / softmax_scale is 8e-06; accepted: 1.52588e-05 to 65536"},
      {[](AttentionParams& p) { p.alibi_slopes = numbers, p.softmax_scale = 1e-20; },
       "softmax_scale is 1e-20; accepted with alibi_slopes: from 9.09495e-13"},
      {[](AttentionParams& p) { p.head_dim = 20; },
       "head_dim is 20; accepted: multiples of 8 up to 256"},
      {[](AttentionParams& p) { p.head_dim_v = 60; },
       "head_dim of v is 60; accepted: multiples of 8 up to 256"},
      {[](AttentionParams& p) { p.k_row_stride = 516; },
       "k has a row stride of 1032 bytes; accepted: multiples of 16 from 0 to 1099511627760"},
      {[](AttentionParams& p) { p.q_batch_stride = std::int64_t{1} << 39; },
       "q has a batch stride of 1099511627776 bytes; accepted: multiples of 16 from 0 to "
       "1099511627760"},
  };
  for (const auto& r : refused) {
    AttentionParams p = problem(DType::kFloat16, 64);
    r.change(p);
    CHECK_THROWS(dlattn::plan(p, h200, force(Kernel::kSm90)), UnsupportedError,
                 std::string("no kernel can run this: sm90: ") + r.why);
    CHECK(dlattn::plan(p, h200).kernel == Kernel::kWmma);  // it goes elsewhere by itself
  }
  // Score terms have kernels of their own.
  for (const int head_dim : {64, 128, 256}) {
    for (const bool alibi : {false, true}) {
      AttentionParams p = problem(DType::kFloat16, head_dim);
      if (alibi) p.alibi_slopes = numbers;
      if (!alibi) p.softcap = 30.0;
      const Plan plan = dlattn::plan(p, h200);
      CHECK(plan.kernel == Kernel::kSm90);
      CHECK(std::string(plan.variant_name) == "computed");
      const TileConfig config = sm90::tile_config(head_dim, head_dim, sm90::Terms::kComputed);
      CHECK_EQ(plan.block_m, config.block_m);
      CHECK_EQ(plan.smem_bytes, config.smem_bytes);
      CHECK_EQ(plan.num_warps, config.num_warps);
    }
  }
  // Those of small grids too, for which wmma has no tiles but its general ones.
  for (const std::int64_t seqlen : {256, 512}) {
    AttentionParams p = problem(DType::kFloat16, 64);
    p.batch_size = 1, p.seqlen_q = p.seqlen_k = seqlen, p.softcap = 30.0;
    CHECK(dlattn::plan(p, h200).kernel == (seqlen == 512 ? Kernel::kSm90 : Kernel::kWmma));
    p.softcap = 0.0;
    CHECK(dlattn::plan(p, h200).kernel == Kernel::kWmma);
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
    p.bias = numbers, p.bias_col_stride = 1;
    p.bias_dtype = c.wide ? DType::kFloat32 : DType::kFloat16;
    if (c.mask) p.mask = bools, p.mask_col_stride = 1;
    const Plan plan = dlattn::plan(p, h200);
    CHECK(plan.kernel == Kernel::kSm90);
    CHECK(std::string(plan.variant_name) == "loaded");
    const int tiles = (plan.block_m * plan.block_n) * ((c.wide ? 4 : 2) + (c.mask ? 1 : 0));
    const TileConfig config = sm90::tile_config(c.head_dim, c.head_dim, sm90::Terms::kLoaded);
    CHECK_EQ(plan.smem_bytes, config.smem_bytes + c.stages * tiles);
    CHECK(plan.smem_bytes <= h200.max_smem_per_block);
  }
  AttentionParams odd = problem(DType::kFloat16, 64);
  odd.out = memory + 8;
  const Support support = supported(odd, h200, force(Kernel::kSm90));
  CHECK(!support.ok && support.reasons[0].find("sm90: out begins at ") == 0);
  CHECK(support.reasons[0].find("; accepted: multiples of 16 bytes") != std::string::npos);
  // By itself the plan takes it where its large blocks find an SM each, and has blocks stay for
  // several works where those are short and many.
  const struct {
    std::int64_t batch_size, heads, seqlen;
    int head_dim;
    Kernel kernel;
    std::int64_t grid;
    std::int64_t causal_grid = 0;  // where it differs
  } choices[] = {
      {1, 8, 512, 64, Kernel::kWmma, 0},
      {1, 8, 2048, 64, Kernel::kWmma, 0},
      {1, 32, 1024, 64, Kernel::kSm90, 128},
      {1, 8, 2048, 128, Kernel::kSm90, 128},
      {1, 8, 512, 128, Kernel::kWmma, 0},
      {1, 8, 1024, 128, Kernel::kSm90, 64},
      {1, 8, 512, 256, Kernel::kSm90, 32},
      {1, 8, 256, 256, Kernel::kSm90, 16},
      // Blocks that are up to half full, and few keys.
      {8, 32, 64, 128, Kernel::kWmma, 0},
      {8, 32, 128, 128, Kernel::kSm90, 256},
      {8, 32, 128, 64, Kernel::kWmma, 0},
      {8, 32, 192, 64, Kernel::kSm90, 256},
      {4, 32, 64, 256, Kernel::kSm90, 128},
      {8, 32, 64, 256, Kernel::kWmma, 0},
      {4, 32, 4096, 64, Kernel::kSm90, 2048},
      {32, 32, 512, 64, Kernel::kSm90, 132},
      {16, 16, 1024, 128, Kernel::kSm90, 132},
      {8, 32, 512, 128, Kernel::kSm90, 132},
      {8, 16, 1024, 128, Kernel::kSm90, 132, 1024},  // shares of 8 works, of 8 lengths
      {8, 16, 2048, 128, Kernel::kSm90, 132, 2048},
      {16, 8, 1024, 256, Kernel::kSm90, 132, 1024},
      {16, 16, 1024, 256, Kernel::kSm90, 132, 2048},  // one stage of Q
      {1, 32, 1024, 128, Kernel::kSm90, 256},
      {4, 16, 4096, 128, Kernel::kSm90, 2048},
      {32, 8, 512, 256, Kernel::kSm90, 132},
      {16, 8, 512, 256, Kernel::kSm90, 512},
      {70000, 8, 4096, 128, Kernel::kSm90, 17920000},
  };
  for (const auto& c : choices) {
    AttentionParams q = problem(DType::kFloat16, c.head_dim);
    q.batch_size = c.batch_size, q.num_heads = q.num_heads_kv = c.heads;
    q.seqlen_q = q.seqlen_k = c.seqlen;
    const std::string name = "heads " + std::to_string(c.heads) + ", seqlen " +
                             std::to_string(c.seqlen) + ", head_dim " + std::to_string(c.head_dim);
    const Plan plan = core::make_plan(q, h200, {});
    CHECK_FOR(plan.kernel == c.kernel, name);
    if (c.kernel == Kernel::kSm90) {
      CHECK_FOR(plan.grid == c.grid, name);
      q.causal = Causal::kBottomRight;
      const std::int64_t grid = core::make_plan(q, h200, {}).grid;
      CHECK_FOR(grid == (c.causal_grid ? c.causal_grid : c.grid), name + ", causal");
    }
    CHECK(core::make_plan(q, gpus()[0], {}).kernel == Kernel::kWmma);
  }
  AttentionParams few = problem(DType::kFloat16, 128);  // rows of queries, in blocks of 128
  few.batch_size = 64, few.seqlen_q = 64;
  CHECK(core::make_plan(few, h200, {}).kernel == Kernel::kWmma);
  few.seqlen_q = 65;
  CHECK(core::make_plan(few, h200, {}).kernel == Kernel::kSm90);
  few.seqlen_q = 512, few.seqlen_k = 64;
  CHECK(core::make_plan(few, h200, {}).kernel == Kernel::kWmma);
  few.seqlen_k = 128;
  CHECK(core::make_plan(few, h200, {}).kernel == Kernel::kSm90);
  // A window makes walks short, so blocks stay for several of them.
  AttentionParams narrow = problem(DType::kFloat16, 128);
  narrow.batch_size = 16, narrow.seqlen_q = narrow.seqlen_k = 4096,
  narrow.causal = Causal::kBottomRight;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, 4096);
  narrow.window_left = 1024;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, 4096);
  narrow.window_left = 512;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, 132);
  narrow.causal = Causal::kNone;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, 4096);
  narrow.window_right = 100;
  CHECK_EQ(core::make_plan(narrow, h200, {}).grid, 132);
  // A dimension of one element has no stride; without keys there is nothing to copy.
  AttentionParams p = problem(DType::kFloat16, 64);
  p.batch_size = 1, p.q_batch_stride = 3, p.seqlen_k = 0, p.k = p.v = nullptr, p.k_row_stride = 1;
  CHECK(supported(p, h200, force(Kernel::kSm90)).ok);
}

// Packs on sm90: what decides is the tokens, not the longest sequence.
void sm90_packs() {
  static const std::int32_t offsets[2] = {};
  const DeviceInfo h200 = gpus().back();
  const auto pack = [](std::int64_t sequences, std::int64_t tokens, std::int64_t longest,
                       int head_dim) {
    AttentionParams p = problem(DType::kFloat16, head_dim);
    p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = p.out_batch_stride = 3;  // ignored
    p.cu_seqlens_q = p.cu_seqlens_k = offsets;
    p.batch_size = sequences, p.total_q = p.total_k = tokens, p.seqlen_q = p.seqlen_k = longest;
    return p;
  };
  const struct {
    std::int64_t sequences, tokens, longest;
    int head_dim;
    Kernel kernel;
    std::int64_t grid;
  } choices[] = {
      {64, 131584, 4096, 128, Kernel::kSm90, (131584 / 128 + 64) * 8},
      {64, 131584, 4096, 64, Kernel::kSm90, (131584 / 256 + 64) * 8},
      {1000, 1000, 1, 128, Kernel::kWmma, 0},
      {1000, 1000 + 8192, 8192, 128, Kernel::kWmma, 0},
      {100, 100 * 64, 4096, 128, Kernel::kWmma, 0},
      {100, 100 * 65, 4096, 128, Kernel::kSm90, (6500 / 128 + 100) * 8},
      {256, 256 * 300, 1000, 128, Kernel::kSm90, 132},
      {1, 0, 0, 128, Kernel::kWmma, 0},
  };
  for (const auto& c : choices) {
    const Plan plan = dlattn::plan(pack(c.sequences, c.tokens, c.longest, c.head_dim), h200);
    const std::string name = std::to_string(c.sequences) + " sequences, " +
                             std::to_string(c.tokens) + " tokens, head_dim " +
                             std::to_string(c.head_dim);
    CHECK_FOR(plan.kernel == c.kernel, name);
    if (c.kernel == Kernel::kSm90) CHECK_FOR(plan.grid == c.grid, name);
  }
  // A pack's tensor maps hold shorter steps than a batch's.
  AttentionParams p = pack(2, 4096, 4096, 128);
  p.v_row_stride = std::int64_t{1} << 33;
  CHECK_THROWS(dlattn::plan(p, h200, force(Kernel::kSm90)), UnsupportedError,
               "no kernel can run this: sm90: v has a row stride of 17179869184 bytes; accepted: "
               "multiples of 16 from 0 to 17179869168");
  p.v_row_stride = 0;
  CHECK(supported(p, h200, force(Kernel::kSm90)).ok);
}

// batch_invariant: what surrounds a sequence changes neither kernel nor tile shape.
void batch_invariance() {
  static const std::int32_t offsets[2] = {};
  Options options;
  options.batch_invariant = true;
  bool matters = false;
  for (const DeviceInfo& device : gpus()) {
    for (const int head_dim : {32, 64, 96, 128, 192, 256}) {
      AttentionParams p = problem(DType::kFloat16, head_dim);
      p.num_heads = p.num_heads_kv = 64, p.batch_size = 64, p.seqlen_q = p.seqlen_k = 8192;
      p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = 0;
      const Plan large = core::make_plan(p, device, {});
      for (const std::int64_t batch_size : {1, 3, 64}) {
        for (const std::int64_t seqlen : {1, 100, 512, 8192}) {
          for (const std::int64_t num_heads : {1, 8, 64}) {
            for (const bool varlen : {false, true}) {
              p.batch_size = batch_size, p.seqlen_q = p.seqlen_k = seqlen;
              p.num_heads = p.num_heads_kv = num_heads;
              p.cu_seqlens_q = p.cu_seqlens_k = varlen ? offsets : nullptr;
              p.total_q = p.total_k = varlen ? batch_size * seqlen : 0;
              const Plan plan = core::make_plan(p, device, options);
              CHECK(plan.kernel == large.kernel);
              CHECK_EQ(plan.variant, large.variant);
              CHECK_EQ(plan.block_m, large.block_m);
              CHECK_EQ(plan.num_splits, 1);
              const Plan fastest = core::make_plan(p, device, {});
              matters |= fastest.variant != large.variant || fastest.kernel != large.kernel;
            }
          }
        }
      }
    }
  }
  CHECK(matters);
  // Alignment is that of the rows there are: of neither less nor more.
  AttentionParams p = problem(DType::kFloat16, 64);
  p.batch_size = 1, p.q_batch_stride = 1;
  CHECK_EQ(core::make_plan(p, gpus()[0], options).variant, wmma::kWide);
  p.q_head_stride = 65;
  CHECK_EQ(core::make_plan(p, gpus()[0], options).variant, wmma::kGeneral);
}

void forced_kernels() {
  for (const DeviceInfo& device : gpus()) {
    for (const Kernel kernel :
         {Kernel::kScalar, Kernel::kWmmaQk, Kernel::kWmmaSmem, Kernel::kWmma}) {
      const Plan plan = dlattn::plan(problem(DType::kFloat16, 64), device, force(kernel));
      CHECK(plan.kernel == kernel);
    }
    const struct {
      Kernel kernel;
      DType dtype;
      int head_dim;
      const char* why;
    } refused[] = {
        {Kernel::kWmmaQk, DType::kFloat32, 64,
         "wmma_qk: dtype is float32; accepted: float16, bfloat16"},
        {Kernel::kWmmaSmem, DType::kFloat64, 64,
         "wmma_smem: dtype is float64; accepted: float16, bfloat16"},
        {Kernel::kScalar, DType::kFloat64, 64,
         "scalar: dtype is float64; accepted on a GPU: float16, bfloat16, float32"},
        {Kernel::kWmmaQk, DType::kFloat16, 20,
         "wmma_qk: head_dim is 20; accepted: multiples of 16 up to 128"},
        {Kernel::kWmmaSmem, DType::kFloat16, 144,
         "wmma_smem: head_dim is 144; accepted: multiples of 16 up to 128"},
        {Kernel::kWmma, DType::kFloat32, 64, "wmma: dtype is float32; accepted: float16, bfloat16"},
        {Kernel::kWmma, DType::kFloat16, 257, "wmma: head_dim is 257; accepted: 1 to 256"},
        {Kernel::kScalar, DType::kFloat16, 257, "scalar: head_dim is 257; accepted: 1 to 256"},
        {Kernel::kCpu, DType::kFloat16, 64, "cpu: the tensors are on a CUDA device"},
    };
    for (const auto& r : refused) {
      const AttentionParams p = problem(r.dtype, r.head_dim);
      CHECK_THROWS(dlattn::plan(p, device, force(r.kernel)), UnsupportedError,
                   std::string("no kernel can run this: ") + r.why);
      const Support support = supported(p, device, force(r.kernel));
      CHECK(!support.ok && support.reasons.size() == 1 && support.reasons[0] == r.why);
    }
    AttentionParams p = problem(DType::kFloat16, 64);
    p.head_dim_v = 40;  // rows of out may lie apart
    CHECK_THROWS(dlattn::plan(p, device, force(Kernel::kWmmaQk)), UnsupportedError,
                 "no kernel can run this: wmma_qk: head_dim of v is 40; accepted: multiples of 16 "
                 "up to 128");
  }
  DeviceInfo cpu;
  cpu.isa = "portable";
  cpu.num_threads = 1;
  for (const Kernel kernel : {Kernel::kScalar, Kernel::kWmmaQk, Kernel::kWmmaSmem, Kernel::kWmma}) {
    CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 64), cpu, force(kernel)), UnsupportedError,
                 std::string("no kernel can run this: ") + to_string(kernel) +
                     ": the tensors are on the CPU");
  }
}

// A feature that a family lacks is refused by name when that family is forced, and goes elsewhere
// when it is not.
void features() {
  const DeviceInfo device = gpus()[0];
  alignas(16) static const float numbers[64] = {};
  alignas(16) static const std::uint8_t bools[64] = {};
  const struct {
    const char* name;
    void (*set)(AttentionParams&);
  } features[] = {
      {"softcap", [](AttentionParams& p) { p.softcap = 30.0; }},
      {"bias", [](AttentionParams& p) { p.bias = numbers; }},
      {"mask", [](AttentionParams& p) { p.mask = bools; }},
      {"alibi_slopes", [](AttentionParams& p) { p.alibi_slopes = numbers; }},
  };
  for (const auto& feature : features) {
    AttentionParams p = problem(DType::kFloat16, 64);
    feature.set(p);
    for (const Kernel kernel : {Kernel::kWmmaQk, Kernel::kWmmaSmem}) {
      CHECK_THROWS(dlattn::plan(p, device, force(kernel)), UnsupportedError,
                   std::string("no kernel can run this: ") + to_string(kernel) +
                       ": does not implement " + feature.name);
    }
    CHECK(dlattn::plan(p, device).kernel == Kernel::kWmma);
    CHECK_EQ(dlattn::plan(p, device).variant, wmma::kGeneral);
    // Bias and mask pass through shared memory of their own.
    CHECK_EQ(dlattn::plan(p, device).smem_bytes,
             wmma::general_smem_bytes(64, p.mask != nullptr, p.bias ? 4 : 0));
  }
}

// With no kernel left, the message names every family's reason.
void all_reasons() {
  const Support support = supported(problem(DType::kFloat16, 300), gpus()[0]);
  CHECK_EQ(support.reasons.size(), 4u);
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat64, 64), gpus()[0]), UnsupportedError,
               "no kernel can run this: wmma: dtype is float64; accepted: float16, bfloat16; "
               "wmma_smem: dtype is float64; accepted: float16, bfloat16; "
               "scalar: dtype is float64; accepted on a GPU: float16, bfloat16, float32; "
               "wmma_qk: dtype is float64; accepted: float16, bfloat16");
}

void copy_bytes() {
  const DeviceInfo device = gpus()[0];
  const auto bytes = [&](auto change) {
    AttentionParams p = problem(DType::kFloat16, 64);
    change(p);
    return dlattn::plan(p, device).copy_bytes;
  };
  CHECK_EQ(bytes([](auto&) {}), 16);
  CHECK_EQ(bytes([](auto& p) { p.q = memory + 8; }), 8);
  CHECK_EQ(bytes([](auto& p) { p.k = memory + 4; }), 4);
  CHECK_EQ(bytes([](auto& p) { p.v = memory + 2; }), 2);
  CHECK_EQ(bytes([](auto& p) { p.k_row_stride += 4; }), 8);
  CHECK_EQ(bytes([](auto& p) { p.v_head_stride += 2; }), 4);
  CHECK_EQ(bytes([](auto& p) { p.q_batch_stride += 1; }), 2);
  CHECK_EQ(bytes([](auto& p) { p.q_batch_stride += 1, p.batch_size = 1; }),
           16);  // a stride that is never taken
  CHECK_EQ(bytes([](auto& p) { p.k_row_stride = 0; }), 16);
  CHECK_EQ(dlattn::plan(problem(DType::kFloat16, 20), device).copy_bytes, 8);  // rows of 40 bytes
  // The length of a row counts, however well the rows are spaced.
  CHECK_EQ(bytes([](auto& p) { p.head_dim = 20; }), 8);
  CHECK_EQ(bytes([](auto& p) { p.head_dim_v = 18; }), 4);
  CHECK_EQ(dlattn::plan(problem(DType::kFloat16, 7), device).copy_bytes, 2);
  CHECK_EQ(dlattn::plan(problem(DType::kFloat32, 7), device).copy_bytes, 4);
}

void too_little_shared_memory() {
  // As much as the smallest instance of wmma_smem needs, which is less than any real device has.
  const int most = wmma_smem::tile_config(32).smem_bytes;
  const DeviceInfo small = gpu("a small GPU", 8, 6, 10, most);
  const auto needs = [](const char* kernel, int bytes) {
    return std::string(kernel) + ": needs " + std::to_string(bytes) +
           " bytes of shared memory per block; a small GPU has " + std::to_string(most);
  };
  const int fp32_bytes = scalar::tile_config(4, 256).smem_bytes;
  CHECK(fp32_bytes > most);
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat32, 256), small, force(Kernel::kScalar)),
               UnsupportedError, "no kernel can run this: " + needs("scalar", fp32_bytes));
  const int smem_bytes = wmma_smem::tile_config(128).smem_bytes;
  CHECK(smem_bytes > most);
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 128), small, force(Kernel::kWmmaSmem)),
               UnsupportedError, "no kernel can run this: " + needs("wmma_smem", smem_bytes));
  CHECK(dlattn::plan(problem(DType::kFloat16, 32), small).variant == wmma::kNarrow);
  // At exactly what it needs it runs, one byte less it does not.
  const AttentionParams p = problem(DType::kFloat16, 64);
  const int exact = wmma_smem::tile_config(64).smem_bytes;
  CHECK(supported(p, gpu("x", 8, 9, 1, exact), force(Kernel::kWmmaSmem)).ok);
  CHECK(!supported(p, gpu("x", 8, 9, 1, exact - 1), force(Kernel::kWmmaSmem)).ok);
}

// Grids are one-dimensional, so 65,535 is no limit; 2^31 - 1 is.
void grids() {
  AttentionParams p = problem(DType::kFloat16, 64);
  p.batch_size = 70000;
  p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = 0;
  p.seqlen_q = p.seqlen_k = 64;
  CHECK_EQ(dlattn::plan(p, gpus()[0]).grid, 70000 * 8);
  p.batch_size = 300000000;
  CHECK_THROWS(dlattn::plan(p, gpus()[0], force(Kernel::kWmmaSmem)), UnsupportedError,
               "no kernel can run this: wmma_smem: needs 2400000000 thread blocks; accepted: up to "
               "2147483647");
  p.batch_size = 0;
  CHECK_EQ(dlattn::plan(p, gpus()[0]).grid, 0);
}

void unserved_devices() {
  DeviceInfo turing = gpu("Tesla T4", 7, 5, 40, 65536);
  turing.unserved = "Tesla T4 has compute capability 7.5; this build serves 8.0 and later";
  const Support support = supported(problem(DType::kFloat16, 64), turing);
  CHECK(!support.ok);
  CHECK_EQ(support.reasons.size(), 4u);
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 64), turing, force(Kernel::kScalar)),
               UnsupportedError,
               "no kernel can run this: scalar: Tesla T4 has compute capability 7.5; this build "
               "serves 8.0 and later");
}

void archs() {
  using core::archs_serve;
  const char* release = "80-real;89-real;90-real;120-real;89-virtual";
  CHECK(!archs_serve(release, 7, 5));
  CHECK(archs_serve(release, 8, 0));
  CHECK(archs_serve(release, 8, 6));  // machine code for 8.0
  CHECK(archs_serve(release, 8, 9));
  CHECK(archs_serve(release, 9, 0));
  CHECK(archs_serve(release, 10, 0));  // PTX for 8.9
  CHECK(archs_serve(release, 12, 1));
  CHECK(!archs_serve("89-real", 8, 6));  // machine code does not run on older minors
  CHECK(!archs_serve("89-real", 9, 0));  // nor on another major
  CHECK(archs_serve("89-virtual", 9, 0));
  CHECK(!archs_serve("89-virtual", 8, 6));
  CHECK(archs_serve("89", 8, 9));  // without a suffix: both
  CHECK(archs_serve("89", 12, 0));
  CHECK(archs_serve("90a", 9, 0));
  CHECK(!archs_serve("90a", 10, 0));
  CHECK(!archs_serve("90a-virtual", 10, 0));
  CHECK(!archs_serve("", 8, 9));
  CHECK(!archs_serve("native", 8, 9));
}

void registry() {
  using core::head_dim_tile;
  CHECK_EQ(head_dim_tile(Kernel::kScalar, DType::kFloat16, 1), 64);
  CHECK_EQ(head_dim_tile(Kernel::kScalar, DType::kFloat32, 64), 64);
  CHECK_EQ(head_dim_tile(Kernel::kScalar, DType::kBFloat16, 65), 128);
  CHECK_EQ(head_dim_tile(Kernel::kScalar, DType::kFloat16, 256), 256);
  CHECK_EQ(head_dim_tile(Kernel::kScalar, DType::kFloat16, 257), 0);
  CHECK_EQ(head_dim_tile(Kernel::kScalar, DType::kFloat64, 64), 0);
  for (const Kernel kernel : {Kernel::kWmmaQk, Kernel::kWmmaSmem}) {
    for (const DType dtype : kHalves) {
      CHECK_EQ(head_dim_tile(kernel, dtype, 16), 32);
      CHECK_EQ(head_dim_tile(kernel, dtype, 33), 64);
      CHECK_EQ(head_dim_tile(kernel, dtype, 96), 96);
      CHECK_EQ(head_dim_tile(kernel, dtype, 128), 128);
      CHECK_EQ(head_dim_tile(kernel, dtype, 129), 0);
    }
    CHECK_EQ(head_dim_tile(kernel, DType::kFloat32, 64), 0);
  }
  CHECK_EQ(head_dim_tile(Kernel::kCpu, DType::kFloat32, 64), 0);
}

void descriptions() {
  const std::string text = describe(dlattn::plan(problem(DType::kFloat16, 64), gpus()[0]));
  for (const char* part : {"kernel: wmma:narrow\n", "dtype: float16\n",
                           "tile: ", "grid: ", "shared memory: ", "splits: 1"}) {
    CHECK_FOR(text.find(part) != std::string::npos, part);
  }
  AttentionParams p = problem(DType::kFloat64, 64);
  p.device = {};
  DeviceInfo cpu;
  cpu.isa = "portable";
  cpu.num_threads = 3;
  const std::string cpu_text = describe(dlattn::plan(p, cpu));
  for (const char* part : {"kernel: cpu\n", "dtype: float64\n", "threads: 3, portable, "}) {
    CHECK_FOR(cpu_text.find(part) != std::string::npos, part);
  }
}

void names() {
  CHECK_EQ(std::string(to_string(DType::kBFloat16)) == "bfloat16", true);
  CHECK_EQ(std::string(to_string(DeviceType::kCuda)) == "cuda", true);
  CHECK_EQ(std::string(to_string(Kernel::kWmmaSmem)) == "wmma_smem", true);
  CHECK_EQ(std::string(to_string(Kernel::kWmma)) == "wmma", true);
  CHECK_EQ(size_of(DType::kFloat16), 2);
  CHECK_EQ(size_of(DType::kBFloat16), 2);
  CHECK_EQ(size_of(DType::kFloat32), 4);
  CHECK_EQ(size_of(DType::kFloat64), 8);
}

}  // namespace

int main() {
  automatic_choice();
  shared_memory_of_every_instance();
  tile_shapes();
  forced_variants();
  packed_heads();
  packed_launches();
  sm90_plans();
  sm90_packs();
  batch_invariance();
  forced_kernels();
  features();
  all_reasons();
  copy_bytes();
  too_little_shared_memory();
  grids();
  unserved_devices();
  archs();
  registry();
  descriptions();
  names();
  return test::summary();
}
