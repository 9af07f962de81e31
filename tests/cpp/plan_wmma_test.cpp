// Plans of wmma: its tile shapes, and heads that share tiles.
#include <string>

#include "check.h"
#include "core/plan/plan.h"
#include "cuda/forward/wmma/boxes.h"
#include "cuda/forward/wmma/packing.h"
#include "cuda/forward/wmma/traits.h"
#include "plan_problems.h"

using namespace dlattn;
using test::force;
using test::gpus;
using test::memory;
using test::problem;

namespace {

// The tile shapes of wmma that its cost model chooses.
void tile_shapes() {
  constexpr int kW = wmma::kWide, kN = wmma::kNarrow, kS = wmma::kSplit, kB = wmma::kPersistent,
                kA = wmma::kPipelined, kAll = wmma::kSinglePass;
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
      {1, 8, 4096, 64, false, kN, kW, kN, kB},
      {1, 8, 4096, 64, true, kN, kN, kN, kN},
      {1, 8, 4096, 128, false, kN, kN, kN, kB},
      {1, 32, 1024, 128, true, kN, kN, kN, kN},
      // Many rows. Two wide blocks of head_dim 128 need 194 KB of an SM.
      {32, 32, 512, 64, true, kN, kN, kW, kB},
      {4, 32, 4096, 64, true, kN, kW, kW, kB},
      {32, 16, 512, 128, true, kN, kN, kN, kB},
      // TMA where there is any, and an SM holds 194 KB.
      {4, 16, 4096, 128, false, kN, kN, kN, kB},
      {4, 16, 4096, 128, true, kN, kN, kN, kB},
      // Registers leave one wide block of head_dim 256 to an SM.
      {1, 8, 1024, 256, false, kN, kN, kN, kN},
      {4, 8, 4096, 256, false, kA, kA, kN, kB},
      {4, 8, 4096, 192, true, kN, kN, kN, kB},
  };
  const std::vector<DeviceInfo> devices = gpus();
  for (const auto& c : cases) {
    AttentionParams p = problem(DType::kFloat16, c.head_dim);
    p.batch_size = c.batch_size, p.seqlen_q = p.seqlen_k = c.seqlen;
    p.num_heads = p.num_heads_kv = c.heads;
    p.out.row_stride = c.heads * c.head_dim;
    p.out.batch_stride = c.seqlen * p.out.row_stride;
    p.causal = c.causal ? Causal::kBottomRight : Causal::kNone;
    const int expected[] = {c.l4, c.rtx4090, c.a100, c.h200};
    for (int i = 0; i < 4; ++i) {
      const Plan plan = dlattn::plan(p, devices[i], force("wmma"));
      CHECK_FOR(plan.variant == expected[i],
                devices[i].name + " head_dim " + std::to_string(c.head_dim) + " seqlen " +
                    std::to_string(c.seqlen) + ": " + plan.variant_name);
    }
  }
  // Varlen batches count by their tokens, not by the longest: few of them leave SMs idle.
  AttentionParams packed = problem(DType::kFloat16, 64);
  const std::int32_t starts[] = {0, 1, 2};
  packed.cu_seqlens_q = packed.cu_seqlens_k = starts;
  packed.seqlen_q = packed.seqlen_k = 2048;
  packed.total_q = packed.total_k = 64;
  CHECK_EQ(dlattn::plan(packed, devices[3], force("wmma")).variant, kS);
  packed.total_q = packed.total_k = 4096;
  CHECK(dlattn::plan(packed, devices[3], force("wmma")).variant != kS);
}

void forced_variants() {
  const DeviceInfo device = gpus()[0];
  AttentionParams p = problem(DType::kFloat16, 64);
  Options options = force("wmma");
  for (int variant = 0; variant < wmma::kNumVariants; ++variant) {
    if (!wmma::has_variant(64, variant) || variant == wmma::kSinglePass ||
        wmma::uses_tma(64, variant))
      continue;
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
    refused([](auto& odd) { odd.v.data = memory + 4; },
            ": rows of q, k and v are aligned to 4 bytes; accepted: 16");
  }
  // Whole needs room for all keys.
  options.variant = "single_pass";
  CHECK_THROWS(
      dlattn::plan(p, gpus()[3], options), UnsupportedError,
      "no kernel can run this: wmma: variant single_pass: seqlen_k is 2048; accepted: up to 512");
  p.seqlen_q = p.seqlen_k = 512;
  CHECK_EQ(dlattn::plan(p, gpus()[3], options).smem_bytes, 136192);
  CHECK_THROWS(dlattn::plan(p, device, options), UnsupportedError,
               "no kernel can run this: wmma: needs 136192 bytes of shared memory per block; " +
                   device.name + " has 101376");
  const std::int32_t starts[] = {0, 1, 2};
  p.cu_seqlens_q = p.cu_seqlens_k = starts, p.total_q = p.total_k = 2;
  CHECK_THROWS(
      dlattn::plan(p, gpus()[3], options), UnsupportedError,
      "no kernel can run this: wmma: variant single_pass: does not implement cu_seqlens_q");
  p = problem(DType::kFloat16, 64);
  // Split counts offsets in 32 bits.
  AttentionParams far = p;
  far.k.row_stride = std::int64_t{1} << 32;
  options.variant = "split";
  CHECK_THROWS(dlattn::plan(far, device, options), UnsupportedError,
               "no kernel can run this: wmma: variant split: q, k or v spans 32 GiB or more; "
               "accepted: less");
  far.k.row_stride = p.k.row_stride, far.seqlen_q = far.seqlen_k = 96;
  CHECK_EQ(dlattn::plan(far, gpus()[3], force("wmma")).variant, wmma::kSplit);
  far.v.head_stride = std::int64_t{1} << 35;
  CHECK(dlattn::plan(far, gpus()[3], force("wmma")).variant != wmma::kSplit);
  options.variant = "huge";
  const Support unknown = supported(p, device, options);
  CHECK(!unknown.ok);
  CHECK(unknown.reasons.at(0).find("wmma: variant is huge; accepted: wide, narrow") == 0);
  options.kernel = "scalar", options.variant = "narrow";
  CHECK_THROWS(dlattn::plan(p, device, options), UnsupportedError,
               "no kernel can run this: scalar: variant is narrow; accepted: none, this kernel has "
               "one tile shape");
  options.kernel = "auto";  // the only family that has it
  CHECK(dlattn::plan(p, device, options).kernel == "wmma");
}

// Persistent is for devices and builds with TMA, and for tensors that it can be told of.
void copy_engine() {
  const DeviceInfo hopper = gpus()[3];
  Options options = force("wmma");
  options.variant = "persistent";
  const AttentionParams p = problem(DType::kFloat16, 128);
  CHECK_EQ(dlattn::plan(p, hopper, options).variant, wmma::kPersistent);
  const auto refused = [&](const AttentionParams& odd, const DeviceInfo& device,
                           const std::string& why) {
    CHECK(dlattn::plan(odd, device, force("wmma")).variant != wmma::kPersistent);
    CHECK_THROWS(dlattn::plan(odd, device, options), UnsupportedError,
                 "no kernel can run this: wmma: variant persistent: " + why);
  };
  refused(p, gpus()[2], "needs compute capability 9.0 or later; " + gpus()[2].name + " has 8.0");
  DeviceInfo without = hopper;
  without.code = 89;
  refused(p, without, "needs code for 90 or later, which this build does not have");
  AttentionParams odd = p;
  odd.k.row_stride = std::int64_t{1} << 40;
  refused(odd, hopper,
          "k has a row stride of 2199023255552 bytes; accepted: multiples of 16 from 0 to "
          "1099511627760");
  const std::int32_t starts[] = {0, 1, 2};
  odd = p, odd.cu_seqlens_q = odd.cu_seqlens_k = starts, odd.total_q = odd.total_k = 4096;
  refused(odd, hopper, "does not implement cu_seqlens_q");
  // Its code is left out for 12.0 and later, where no block has the shared memory.
  const DeviceInfo small = test::gpu("RTX 5090", 12, 0, 170, 101376);
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    const int bytes = wmma::tile_config(head_dim, wmma::kPersistent).smem_bytes;
    CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, head_dim), small, options), UnsupportedError,
                 "no kernel can run this: wmma: needs " + std::to_string(bytes) +
                     " bytes of shared memory per block; RTX 5090 has 101376");
  }
  // A sequence of a varlen batch must give the bits that it gives alone.
  Options invariant = force("wmma");
  invariant.batch_invariant = true;
  CHECK(dlattn::plan(p, hopper, invariant).variant != wmma::kPersistent);
}

// Thread blocks that go from item to item: where walks are short, and shares of them equal.
void blocks_of_several_items() {
  const DeviceInfo hopper = gpus()[3];
  Options options = force("wmma");
  options.variant = "persistent";
  AttentionParams p = problem(DType::kFloat16, 128);
  const auto grid = [&](std::int64_t batch_size, std::int64_t seqlen, bool causal) {
    p.batch_size = batch_size, p.seqlen_q = p.seqlen_k = seqlen;
    p.out.batch_stride = seqlen * p.out.row_stride;
    p.causal = causal ? Causal::kBottomRight : Causal::kNone;
    return dlattn::plan(p, hopper, options).grid;
  };
  CHECK_EQ(p.num_heads, 8);
  CHECK_EQ(grid(8, 512, false), 128);  // 256 rows an item
  CHECK_EQ(grid(9, 512, false), 132);
  CHECK_EQ(grid(64, 512, true), 132);  // 512 shares of two items
  CHECK_EQ(grid(20, 512, true), 320);  // 160 shares: some blocks would have two and others one
  CHECK_EQ(grid(8, 4096, false), 1024);
  CHECK_EQ(grid(8, 4096, true), 132);
  CHECK_EQ(grid(8, 8192, true), 2048);
  // Results go to rows by 16 bytes.
  p.out.row_stride += 4, p.out.batch_stride = p.seqlen_q * p.out.row_stride;
  CHECK_THROWS(
      dlattn::plan(p, hopper, options), UnsupportedError,
      "no kernel can run this: wmma: variant persistent: rows of out are aligned to 8 bytes; "
      "accepted: 16");
  CHECK(dlattn::plan(p, hopper, force("wmma")).variant != wmma::kPersistent);
}

// Which boxes a problem's tensors are brought in.
void tensor_boxes() {
  AttentionParams p = problem(DType::kFloat16, 128);
  CHECK(wmma::full_segments(p, 128));
  const wmma::TensorBoxes boxes = wmma::tensor_boxes(p, 128, wmma::kPersistent);
  CHECK_EQ(boxes.q.box_rows, 32);
  CHECK_EQ(boxes.k.box_rows, 64);
  CHECK_EQ(boxes.v.box_columns, 64);
  const cuda::TensorBox all = wmma::all_segments(boxes.k, 128);
  const std::int64_t sizes[] = {64, p.seqlen_k, 2, p.num_heads_kv, p.batch_size};
  const std::int64_t strides[] = {2, p.k.row_stride * 2, 128, p.k.head_stride * 2,
                                  p.k.batch_stride * 2};
  CHECK_EQ(all.rank, 5);
  CHECK_EQ(all.box_depth, 2);
  for (int i = 0; i < 5; ++i) {
    CHECK_EQ(all.sizes[i], sizes[i]);
    CHECK_EQ(all.strides[i], strides[i]);
  }
  // Zeros where v has fewer columns, whole segments or parts of one.
  p.head_dim_v = 64;
  CHECK(wmma::full_segments(p, 128));
  CHECK_EQ(wmma::all_segments(wmma::tensor_boxes(p, 128, wmma::kPersistent).v, 128).sizes[2], 1);
  p.head_dim_v = 72;
  CHECK(!wmma::full_segments(p, 128));
}

// A decoding step: one query, 32 heads of q and 8 of k and v.
AttentionParams decode_problem(std::int64_t batch_size, std::int64_t head_dim) {
  AttentionParams p = problem(DType::kFloat16, head_dim);
  p.batch_size = batch_size, p.num_heads = 32, p.num_heads_kv = 8;
  p.seqlen_q = 1, p.seqlen_k = 4096, p.causal = Causal::kBottomRight;
  p.q.row_stride = p.out.row_stride = 32 * head_dim;
  p.q.batch_stride = p.out.batch_stride = p.q.row_stride;
  return p;
}

// Query heads of one KV head as rows of the same tiles.
void packed_heads() {
  static float numbers[64] = {};
  const auto request = [](const char* variant) {
    Options options;
    options.kernel = "wmma", options.variant = variant;
    return options;
  };
  for (const DeviceInfo& device : gpus()) {
    const AttentionParams p = decode_problem(16, 128);
    const Plan packed = dlattn::plan(p, device, force("wmma")),
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
    CHECK_EQ(dlattn::plan(general, device, force("wmma")).packed_heads, 4);
    general.alibi_slopes.data = numbers;
    CHECK_EQ(dlattn::plan(general, device, force("wmma")).packed_heads, 1);
    // A few queries, as when a draft is verified: a tile takes them all.
    AttentionParams other = p;
    other.seqlen_q = 8, other.out.batch_stride *= 8;
    CHECK_EQ(dlattn::plan(other, device, force("wmma")).packed_heads, 4);
    CHECK_EQ(dlattn::plan(other, device, force("wmma")).grid, 16 * 8);
    // Sinks, which single queries on the general kernel stop at, and varlen batches.
    other.sinks.data = numbers;
    CHECK_EQ(dlattn::plan(other, device, force("wmma")).packed_heads, 4);
    static const std::int32_t offsets[17] = {};
    other.cu_seqlens_q = other.cu_seqlens_k = offsets;
    other.total_q = 16 * 8, other.total_k = 16 * 4096;
    CHECK_EQ(dlattn::plan(other, device, force("wmma")).packed_heads, 4);
    // Nothing to pack, and nothing to gain from it.
    other = p, other.num_heads = 8;
    CHECK_EQ(dlattn::plan(other, device, force("wmma")).packed_heads, 1);
    other = p, other.seqlen_q = 4096, other.out.batch_stride *= 4096;
    CHECK_EQ(dlattn::plan(other, device, force("wmma")).packed_heads, 1);
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
  drafted.seqlen_q = 8, drafted.out.batch_stride *= 8, drafted.softcap = 30.0;
  CHECK_EQ(dlattn::plan(drafted, gpus()[0], force("wmma")).packed_heads, 1);
  CHECK_THROWS(dlattn::plan(drafted, gpus()[0], request("packed")), UnsupportedError,
               "no kernel can run this: wmma: packed: variant general packs heads of one query "
               "(seqlen_q = 1) in problems of fixed length, without sinks and alibi_slopes");
  AttentionParams huge = decode_problem(16, 128);
  huge.seqlen_q = std::int64_t{1} << 29, huge.out.batch_stride *= huge.seqlen_q;
  CHECK_THROWS(dlattn::plan(huge, gpus()[0], request("packed")), UnsupportedError,
               "no kernel can run this: wmma: packed: seqlen_q x heads of a group is 2147483648; "
               "accepted: up to 1073740800");
  for (const char* wrong : {"", "+packed", "packed+split", "split+", "split+packed+packed"}) {
    CHECK_THROWS(
        dlattn::plan(alone, gpus()[0], request(wrong)), UnsupportedError,
        std::string("no kernel can run this: wmma: variant is ") + wrong +
            "; accepted: wide, narrow, split, pipelined, general, single_pass, persistent, packed, "
            "unpacked, "
            "or one of each as in narrow+packed");
  }
}

// The launch shape of a problem whose heads are packed.
void packed_launches() {
  const DeviceInfo device = gpus()[0];
  const auto launched = [&](const AttentionParams& p, const char* variant, auto check) {
    Options options = force("wmma");
    options.variant = variant;
    wmma::with_folded_heads(p, dlattn::plan(p, device, options), check);
  };
  AttentionParams p = decode_problem(2, 64);
  p.num_heads_kv = 1, p.seqlen_q = 3, p.out.batch_stride *= 3;
  p.out.head_stride = 65, p.out.row_stride = 32 * 72, p.out.batch_stride = 3 * p.out.row_stride;
  p.lse.head_stride = 3, p.sinks.head_stride = 2;
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
  CHECK(folded.k.data == static_cast<const char*>(p.k.data) + 4086 * p.k.row_stride * 2);
  CHECK(folded.v.data == static_cast<const char*>(p.v.data) + 4086 * p.v.row_stride * 2);
  CHECK(folded.causal == Causal::kNone && folded.window_left < 0 && folded.window_right < 0);
  p.causal = Causal::kTopLeft;
  CHECK_EQ(wmma::folded_heads(p).seqlen_k, 1);
  CHECK(wmma::folded_heads(p).k.data == p.k.data);
}

// Rows of many keys are general's, or split's where it is the fastest.
void many_keys() {
  const DeviceInfo device = gpus()[1];
  AttentionParams p = problem(DType::kFloat16, 64);
  p.seqlen_k = 131072;
  CHECK_EQ(dlattn::plan(p, device, force("wmma")).variant, wmma::kWide);
  ++p.seqlen_k;
  CHECK_EQ(dlattn::plan(p, device).variant, wmma::kGeneral);
  const auto refused = [&](const char* variant, const std::string& why) {
    Options options = force("wmma");
    options.variant = variant;
    CHECK_THROWS(dlattn::plan(p, device, options), UnsupportedError,
                 "no kernel can run this: wmma: variant " + why);
  };
  refused("wide", "wide: seqlen_k is 131073; accepted: up to 131072");
  refused("narrow", "narrow: seqlen_k is 131073; accepted: up to 131072");
  // Split adds up a group's keys in one go.
  Options split = force("wmma");
  split.variant = "split";
  p.seqlen_k = 4 * 131072;
  CHECK_EQ(dlattn::plan(p, device, split).variant, wmma::kSplit);
  ++p.seqlen_k;
  refused("split", "split: seqlen_k is 524289; accepted: up to 524288");
  AttentionParams few = p;
  few.seqlen_q = 1;
  CHECK_EQ(dlattn::plan(few, device, force("wmma")).variant, wmma::kGeneral);
  few.seqlen_k = 4 * 131072;
  CHECK_EQ(dlattn::plan(few, device, force("wmma")).variant, wmma::kSplit);
  // Pairs of out's columns are set aside.
  for (const auto change :
       {+[](AttentionParams& q) { q.head_dim_v = 63; },
        +[](AttentionParams& q) { q.out.row_stride += 1, q.out.batch_stride *= 2; }}) {
    AttentionParams odd = p;
    change(odd);
    CHECK_THROWS(dlattn::plan(odd, device, force("wmma")), UnsupportedError,
                 "no kernel can run this: wmma: variant general: seqlen_k is 524289; accepted "
                 "where pairs of out's columns are not aligned to 4 bytes: up to 131072");
    CHECK(dlattn::plan(odd, device).kernel != "wmma");
  }
  // With batch_invariant the variant is that of fewer keys, and general is one to ask for by name.
  const std::int32_t starts[] = {0, 1, 2};
  p.cu_seqlens_q = p.cu_seqlens_k = starts;
  p.total_q = 2, p.total_k = p.seqlen_k;
  CHECK_EQ(dlattn::plan(p, device, force("wmma")).variant, wmma::kGeneral);
  Options invariant = force("wmma");
  invariant.batch_invariant = true;
  CHECK_THROWS(dlattn::plan(p, device, invariant), UnsupportedError,
               "no kernel can run this: wmma: variant wide: seqlen_k is 524289; accepted: up to "
               "131072; with batch_invariant no other kernel is taken");
  invariant.variant = "general";
  CHECK_EQ(dlattn::plan(p, device, invariant).variant, wmma::kGeneral);
}

}  // namespace

int main() {
  many_keys();
  tile_shapes();
  forced_variants();
  copy_engine();
  blocks_of_several_items();
  tensor_boxes();
  packed_heads();
  packed_launches();
  return test::summary();
}
