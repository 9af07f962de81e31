// Plans of decode.
#include <algorithm>
#include <string>

#include "check.h"
#include "core/plan/plan.h"
#include "cuda/forward/decode/traits.h"
#include "cuda/tile/accumulation_limits.h"
#include "plan_problems.h"

using namespace dlattn;
using test::force;
using test::gpus;

namespace {

const DeviceInfo h200 = test::gpu("NVIDIA H200", 9, 0, 132, 232448);

AttentionParams problem(std::int64_t batch_size, std::int64_t seqlen_q, std::int64_t seqlen_k,
                        std::int64_t head_dim = 128, std::int64_t heads = 32,
                        std::int64_t heads_kv = 8) {
  AttentionParams p = test::problem(DType::kBFloat16, head_dim);
  p.batch_size = batch_size, p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
  p.num_heads = heads, p.num_heads_kv = heads_kv;
  p.causal = Causal::kBottomRight;
  const auto lay = [](auto* x, std::int64_t rows, std::int64_t head_count, std::int64_t columns) {
    x->head_stride = columns, x->row_stride = head_count * columns;
    x->batch_stride = rows * x->row_stride;
  };
  lay(&p.q, seqlen_q, heads, head_dim), lay(&p.out, seqlen_q, heads, head_dim);
  lay(&p.k, seqlen_k, heads_kv, head_dim), lay(&p.v, seqlen_k, heads_kv, head_dim);
  return p;
}

// A query over many keys: as many blocks as the device holds, by the workspace. Many sequences:
// a block each.
void work_is_partitioned() {
  const Plan one = dlattn::plan(problem(1, 1, 8192), h200);
  CHECK(one.kernel == "decode");
  CHECK(one.variant_name == std::string("rows16"));
  CHECK_EQ(one.grid, 2 * 132);
  CHECK_EQ(one.num_splits, 33);
  CHECK_EQ(one.packed_heads, 4);
  CHECK_EQ(one.workspace_bytes, decode::workspace_map(1, 2 * one.grid, 16, 128).total);
  const Plan many = dlattn::plan(problem(64, 1, 4096), h200);
  CHECK(many.kernel == "decode");
  CHECK_EQ(many.grid, 64 * 8);
  CHECK_EQ(many.num_splits, 1);
  CHECK_EQ(many.workspace_bytes, 0);
  // A block for each would leave half the device idle.
  CHECK_EQ(dlattn::plan(problem(4, 1, 8192), h200).grid, 2 * 132);
  // No more blocks than have two tiles each.
  const DeviceInfo l40s = test::gpu("NVIDIA L40S", 8, 9, 142, 101376);
  CHECK_EQ(dlattn::plan(problem(1, 1, 1024), l40s).grid, 1024 / 64 * 8 / 2);
  // Draft tokens: 32 rows.
  CHECK(dlattn::plan(problem(8, 8, 4096), h200).variant_name == std::string("rows32"));
  // Few keys, and many queries, are for others.
  CHECK(dlattn::plan(problem(1, 1, 512, 64, 8, 8), h200).kernel == "wmma");
  CHECK(dlattn::plan(problem(4, 4096, 4096), h200).kernel == "sm90");
}

// Where lengths are on the device, every block reads those of all sequences: then there are no more
// blocks than the device holds, and the time grows with the sequences.
void lengths_on_the_device() {
  static const std::int32_t lengths[1] = {};
  AttentionParams p = problem(1000, 1, 64);
  const Plan known = dlattn::plan(p, h200, force("decode"));
  CHECK_EQ(known.grid, 1000 * 8);
  p.seqused_k = lengths;
  const Plan plan = dlattn::plan(p, h200);
  CHECK(plan.kernel == "decode");
  CHECK_EQ(plan.num_splits, 1);
  CHECK_EQ(plan.grid, 2 * 132);
  CHECK(plan.predicted_ns > known.predicted_ns + 15e3);
  p.seqused_k = nullptr, p.leftpad_k = lengths;
  CHECK_EQ(dlattn::plan(p, h200).grid, 2 * 132);
}

// Queries of variable length over a cache have as many keys as those of fixed length.
void varlen_queries_over_caches() {
  static const std::int32_t lists[1] = {};
  for (const DeviceInfo& device : gpus()) {
    for (const std::int64_t batch_size : {1, 4, 16, 64}) {
      for (const std::int64_t seqlen_k : {1024, 8192, 131072}) {
        AttentionParams p = problem(batch_size, 1, seqlen_k);
        p.seqused_k = lists;
        p.page_table.data = lists, p.page_table.batch_stride = seqlen_k / 16;
        p.page_size = 16, p.num_pages = batch_size * seqlen_k / 16;
        p.k.batch_stride = p.v.batch_stride = 16 * p.k.row_stride;
        const Plan fixed = dlattn::plan(p, device);
        p.cu_seqlens_q = lists, p.total_q = batch_size;
        p.q.batch_stride = p.out.batch_stride = 0;
        const Plan varlen = dlattn::plan(p, device);
        CHECK(varlen.kernel == fixed.kernel);
        CHECK_EQ(varlen.grid, fixed.grid);
        CHECK_EQ(varlen.num_splits, fixed.num_splits);
        CHECK_EQ(varlen.cluster_size, fixed.cluster_size);
        CHECK_EQ(varlen.workspace_bytes, fixed.workspace_bytes);
      }
    }
  }
}

// More rows than of few queries, where scores are modified and the grid is small.
void modified_scores() {
  AttentionParams p = problem(1, 1024, 1024, 64, 4, 4);
  CHECK(dlattn::plan(p, h200).kernel != "decode");
  p.softcap = 20.0;
  CHECK(dlattn::plan(p, h200).kernel == "decode");
  const DeviceInfo l4 = test::gpu("NVIDIA L4", 8, 9, 58, 101376);  // where it was not measured
  CHECK(dlattn::plan(p, l4).kernel != "decode");
  Options invariant;
  invariant.batch_invariant = true;
  CHECK(dlattn::plan(p, h200, invariant).kernel != "decode");
  p.batch_size = 64;
  CHECK(dlattn::plan(p, h200).kernel == "sm90");
  // With 1024 rows this takes 14.0 us and sm90 37.7; one more row makes no difference.
  p.batch_size = 1, p.seqlen_q = p.seqlen_k = 1025;
  CHECK(dlattn::plan(p, h200).kernel == "decode");
  p.seqlen_q = p.seqlen_k = 2048;
  CHECK(dlattn::plan(p, h200).kernel == "sm90");
}

// Many rows whose grids leave the others most of the device idle, with what was measured on an H200
// (h200-choices-blocks.json), and such that are alike but for others.
void many_rows() {
  const auto plain = [](std::int64_t heads, std::int64_t heads_kv, std::int64_t seqlen_q,
                        std::int64_t seqlen_k, std::int64_t head_dim) {
    AttentionParams p = problem(1, seqlen_q, seqlen_k, head_dim, heads, heads_kv);
    p.causal = Causal::kNone;
    return p;
  };
  // 11.9 us, sm90 19.8, wmma 19.3; 9.2, 13.7, 12.9.
  CHECK(dlattn::plan(plain(32, 4, 16, 2048, 128), h200).kernel == "decode");
  CHECK(dlattn::plan(plain(32, 4, 16, 2048, 64), h200).kernel == "decode");
  AttentionParams p = plain(1, 1, 2048, 2048, 128);
  CHECK(dlattn::plan(p, h200).kernel != "decode");
  p.softcap = 20.0;  // 26.8, sm90 64.0
  CHECK(dlattn::plan(p, h200).kernel == "decode");
  // 11.0, wmma 7.9; 17.2, wmma 13.3; 16.5, sm90 14.5.
  CHECK(dlattn::plan(plain(1, 1, 768, 768, 96), h200).kernel == "wmma");
  CHECK(dlattn::plan(plain(1, 1, 2048, 2048, 64), h200).kernel == "wmma");
  CHECK(dlattn::plan(plain(128, 16, 16, 2048, 64), h200).kernel == "sm90");
  // Elsewhere, or with windows, nobody has measured: others are taken wherever they serve.
  p = plain(32, 4, 16, 2048, 128);
  const DeviceInfo l4 = test::gpu("NVIDIA L4", 8, 9, 58, 101376);
  CHECK(dlattn::plan(p, l4).kernel == "wmma");
  p.window_left = 2048;
  CHECK(dlattn::plan(p, h200).kernel != "decode");
  Options rows16;
  rows16.variant = "rows16";
  CHECK(dlattn::plan(p, l4, rows16).kernel == "decode");
  // A row more is no other problem, by name neither.
  const double few = dlattn::plan(problem(1, 16, 1024), h200, force("decode")).predicted_ns;
  const double more = dlattn::plan(problem(1, 17, 1024), h200, force("decode")).predicted_ns;
  CHECK(more > few && more < 2 * few);
}

void without_a_workspace() {
  Options options = force("decode");
  options.allow_workspace = false;
  const DeviceInfo l40s = test::gpu("NVIDIA L40S", 8, 9, 142, 101376);
  Plan plan = dlattn::plan(problem(1, 1, 8192), l40s, options);
  CHECK_EQ(plan.grid, 8);
  CHECK_EQ(plan.workspace_bytes, 0);
  CHECK_EQ(plan.cluster_size, 1);
  plan = dlattn::plan(problem(1, 1, 8192), h200, options);
  CHECK_EQ(plan.grid, 8 * 8);
  CHECK_EQ(plan.cluster_size, 8);
  CHECK_EQ(plan.workspace_bytes, 0);
}

// A workspace that the call brings is looked at before it is made.
void workspace_of_the_call() {
  AttentionParams p = problem(1, 1, 8192);
  const std::int64_t bytes = dlattn::plan(p, h200).workspace_bytes;
  char* const memory = reinterpret_cast<char*>(std::uintptr_t{1} << 50);
  const auto why = [&](char* at, std::int64_t size) -> std::string {
    p.workspace = at, p.workspace_bytes = size;
    const Support support = supported(p, h200);
    return support.ok ? "" : support.reasons.at(0);
  };
  CHECK(why(memory, bytes) == "");
  CHECK(why(nullptr, 0) == "");
  CHECK(why(memory, bytes - 1) == "workspace has " + std::to_string(bytes - 1) +
                                      " bytes; accepted: at least " + std::to_string(bytes));
  CHECK(why(memory + 128, bytes) ==
        "workspace: its address is 128 byte(s) past a multiple of 256; accepted: multiples of it");
  CHECK(why(static_cast<char*>(p.out.data), bytes).find("out shares memory with workspace") == 0);
}

// Clusters of thread blocks, which add up what they have of a row block without a workspace.
void clusters() {
  const auto size = [](const AttentionParams& p, const Options& options = Options()) {
    const Plan plan = dlattn::plan(p, h200, options);
    if (plan.cluster_size > 1) {
      CHECK(plan.kernel == "decode");
      CHECK_EQ(plan.num_splits, plan.cluster_size);
      CHECK_EQ(plan.workspace_bytes, 0);
      CHECK_EQ(plan.grid % plan.cluster_size, 0);
      CHECK(describe(plan).find("in clusters of " + std::to_string(plan.cluster_size)) !=
            std::string::npos);
    }
    return plan.cluster_size;
  };
  CHECK_EQ(size(problem(1, 1, 1024)), 8);
  CHECK_EQ(size(problem(1, 1, 256), force("decode")), 4);  // no block without keys
  CHECK_EQ(size(problem(1, 1, 131072)), 1);                // half of the SMs are too few
  CHECK_EQ(size(problem(64, 1, 4096)), 1);                 // enough row blocks for all
  CHECK_EQ(size(problem(8, 8, 4096)), 2);
  // Code for older GPUs has no clusters, and no other GPU was measured.
  DeviceInfo older = h200;
  older.code = 89;
  CHECK_EQ(dlattn::plan(problem(1, 1, 1024), older).cluster_size, 1);
  const DeviceInfo blackwell = test::gpu("NVIDIA RTX 5090", 12, 0, 170, 101376);
  CHECK_EQ(dlattn::plan(problem(1, 1, 1024), blackwell).cluster_size, 1);
  // A sequence of a batch may be long and the others short, an only one may not.
  static const std::int32_t lengths[4] = {};
  AttentionParams p = problem(8, 1, 4096);
  CHECK_EQ(size(p), 2);
  p.seqused_k = lengths;
  CHECK_EQ(size(p), 1);
  p = problem(1, 1, 4096);
  p.seqused_k = lengths;
  CHECK_EQ(size(p), 8);
  // Parts that a caller asks for, if there are as many clusters; not those whose bits must not
  // depend on the batch.
  Options options;
  options.num_splits = 4;
  CHECK_EQ(size(problem(1, 1, 4096), options), 4);
  CHECK_EQ(size(problem(2, 1, 4096), options), 4);
  CHECK_EQ(size(problem(8, 1, 4096), options), 1);
  options.num_splits = 5;
  CHECK_EQ(size(problem(1, 1, 4096), options), 1);
  options.num_splits = 1;
  CHECK_EQ(size(problem(1, 1, 4096), options), 1);
  options.num_splits = 0, options.split_size = 128;
  CHECK_EQ(size(problem(1, 1, 1024), options), 1);
  options.split_size = 0, options.batch_invariant = true;
  CHECK_EQ(size(problem(1, 1, 1024), options), 1);
}

// Parts that a caller asks for, and that batch_invariant takes.
void splits() {
  Options options = force("decode");
  options.num_splits = 5;
  Plan plan = dlattn::plan(problem(2, 1, 8192), h200, options);
  CHECK_EQ(plan.num_splits, 5);
  CHECK(plan.fixed_splits);
  CHECK_EQ(plan.grid, 2 * 8 * 5);
  CHECK_EQ(plan.workspace_bytes, decode::workspace_map(2, 2 * 8 * 5, 16, 128).total);
  options.num_splits = 1;
  plan = dlattn::plan(problem(1, 1, 8192), h200, options);
  CHECK_EQ(plan.num_splits, 1);
  CHECK_EQ(plan.grid, 8);
  CHECK_EQ(plan.workspace_bytes, 0);
  // Not more than there are tiles, and of no more blocks than the device holds.
  options.num_splits = 100000;
  plan = dlattn::plan(problem(1, 1, 8192), h200, options);
  CHECK_EQ(plan.num_splits, 8192 / 64);
  CHECK_EQ(plan.grid, 2 * 132);

  options.num_splits = 0;
  options.split_size = 512;
  plan = dlattn::plan(problem(1, 1, 8192), h200, options);
  CHECK_EQ(plan.num_splits, 16);
  CHECK_EQ(plan.split_size, 512);
  CHECK_EQ(plan.workspace_bytes, decode::workspace_map(1, 8 * 16, 16, 128).total);
  plan = dlattn::plan(problem(1, 1, 512), h200, options);  // one part, whose bits are the same
  CHECK_EQ(plan.num_splits, 1);
  CHECK_EQ(plan.split_size, 512);
  CHECK_EQ(plan.workspace_bytes, 0);
  CHECK_THROWS(dlattn::plan(problem(1, 1, 8192), h200,
                            [] {
                              Options other = force("wmma");
                              other.split_size = 512;
                              return other;
                            }()),
               UnsupportedError, "no kernel can run this: wmma: does not implement split_size");

  options = force("decode");
  options.batch_invariant = true;
  const auto invariant = [&](std::int64_t batch_size, std::int64_t seqlen_k) {
    return dlattn::plan(problem(batch_size, 1, seqlen_k), h200, options);
  };
  for (const std::int64_t batch_size : {1, 3, 64}) {
    CHECK_EQ(invariant(batch_size, 8192).split_size, 1024);
    CHECK(invariant(batch_size, 8192).variant_name == invariant(1, 100).variant_name);
  }
  options.allow_workspace = false;
  CHECK_EQ(invariant(1, 8192).num_splits, 1);
  CHECK_EQ(invariant(3, 8192).grid, 24);
}

void wrong_splits() {
  const auto refused = [](auto change, const std::string& why) {
    Options options;
    change(&options);
    CHECK_THROWS(dlattn::plan(problem(1, 1, 8192), h200, options), UnsupportedError, why);
    CHECK(!supported(problem(1, 1, 8192), h200, options).ok);
  };
  refused([](Options* x) { x->num_splits = -1; }, "num_splits is -1; accepted: at least 0");
  refused([](Options* x) { x->split_size = 100; },
          "split_size is 100; accepted: multiples of 128 keys, or 0: the plan decides");
  refused([](Options* x) { x->split_size = -128; },
          "split_size is -128; accepted: multiples of 128 keys, or 0: the plan decides");
  refused([](Options* x) { x->num_splits = 2, x->split_size = 128; },
          "num_splits is given with split_size; accepted: one of them");
  refused([](Options* x) { x->num_splits = 2, x->batch_invariant = true; },
          "num_splits is 2 with batch_invariant; accepted: 0 or 1, or a split_size, as the keys "
          "of a part must not depend on a sequence's length");
}

void check_copies(const AttentionParams& misaligned) {
  CHECK_THROWS(dlattn::plan(misaligned, h200, force("decode")), UnsupportedError,
               "no kernel can run this: decode: rows of q, k and v are aligned to 8 bytes; "
               "accepted: 16");
}

// Keys of 8 bits, beside queries of either dtype.
void caches_of_8_bits() {
  static const std::int32_t lengths[8] = {};
  static const float scale = 0.5f;
  AttentionParams p = problem(8, 1, 32768);
  p.seqused_k = lengths;
  for (const DType dtype : {DType::kInt8, DType::kFloat8E4M3}) {
    p.k.dtype = p.v.dtype = dtype;
    p.k_descale.data = p.v_descale.data = &scale;
    const Plan plan = dlattn::plan(p, h200);
    CHECK(plan.kernel == "decode");
    CHECK(plan.dtype == dtype);
    CHECK_EQ(plan.copy_bytes, 16);
    AttentionParams wrong = p;
    wrong.k_descale.data = nullptr;
    CHECK_THROWS(dlattn::plan(wrong, h200), UnsupportedError,
                 std::string("k_descale is null with a cache of ") + to_string(dtype) +
                     "; accepted: the factor of its elements, [batch_size, num_heads_kv]");
    wrong = p;
    wrong.q_descale.data = &scale;
    CHECK_THROWS(dlattn::plan(wrong, h200), UnsupportedError,
                 "q_descale is given with q of bfloat16; accepted: none, as descales are for "
                 "float8_e4m3fn alone");
    wrong = p;
    wrong.v.dtype = DType::kBFloat16;
    CHECK_THROWS(
        dlattn::plan(wrong, h200), UnsupportedError,
        std::string("v: dtype is bfloat16; accepted: ") + to_string(dtype) + ", that of k");
    wrong = p;
    wrong.seqused_k = nullptr;
    CHECK_THROWS(dlattn::plan(wrong, h200), UnsupportedError,
                 std::string("k: dtype is ") + to_string(dtype) +
                     "; accepted: bfloat16, that of q, as the keys are not in a cache");
    wrong = p;
    wrong.k.row_stride += 8;
    check_copies(wrong);
  }
}

// The host knows how long sequences of a cache can be. One may be long and the others short.
void caches() {
  static const std::int32_t anything[64] = {};
  AttentionParams p = problem(64, 1, 4096);
  p.seqused_k = anything;
  CHECK(dlattn::plan(p, h200).kernel == "decode");
  CHECK_EQ(dlattn::plan(p, h200).grid, 2 * 132);
  CHECK(dlattn::plan(p, h200).workspace_bytes > 0);
  p.seqlen_k = 128;
  CHECK_EQ(dlattn::plan(p, h200).workspace_bytes, 0);
  p = problem(4, 1, 4096);
  p.seqused_k = anything;
  p.page_table.data = anything, p.page_table.batch_stride = 4096 / 256;
  p.page_size = 256, p.num_pages = 64;
  CHECK(dlattn::plan(p, h200).kernel == "decode");
  CHECK_THROWS(
      dlattn::plan(p, h200, force("wmma_qk")), UnsupportedError,
      "no kernel can run this: wmma_qk: does not read keys in a cache: page_table is given");
  // Whatever lies in a table is a page, of 32 bits.
  p.num_pages = std::int64_t{1} << 31;
  CHECK_THROWS(dlattn::plan(p, h200, force("decode")), UnsupportedError,
               "no kernel can run this: decode: the pool has 2147483648 pages; accepted: up to "
               "2147483647");
}

template <typename Change>
void check_refused(AttentionParams p, Change change, const std::string& why,
                   const Options& options = force("decode")) {
  change(&p);
  CHECK_THROWS(dlattn::plan(p, h200, options), UnsupportedError,
               "no kernel can run this: decode: " + why);
}

void refused() {
  static float bias;
  const AttentionParams p = problem(1, 1, 1024);
  check_refused(
      p, [](AttentionParams* x) { x->bias.data = &bias, x->bias.dtype = DType::kFloat32; },
      "does not implement bias");
  check_refused(
      p, [](AttentionParams* x) { x->k.row_stride += 4; },
      "rows of q, k and v are aligned to 8 bytes; accepted: 16");
  const auto nothing = [](AttentionParams*) {};
  check_refused(problem(1, 1, 524289), nothing, "seqlen_k is 524289; accepted: up to 524288");
  check_refused(problem(1, 1, 262145, 256), nothing, "seqlen_k is 262145; accepted: up to 262144");
  check_refused(problem(1, 1, 64, 584), nothing,
                "head_dim is 584; accepted: multiples of 8 up to 576");
  check_refused(problem(1, 1 << 28, 64), nothing,
                "seqlen_q x heads of a group is 1073741824; accepted: up to 1073740800");
  Options options = force("decode");
  options.variant = "rows8";
  check_refused(p, nothing, "variant is rows8; accepted: rows16, rows32", options);
  options.variant = "rows32";
  check_refused(problem(1, 1, 64, 256), nothing, "variant rows32 has no instance for this head_dim",
                options);
}

// A cache of latents, of which V is the first columns.
AttentionParams latents(std::int64_t batch_size, std::int64_t seqlen_k, std::int64_t heads) {
  static const std::int32_t numbers[1] = {};
  AttentionParams p = problem(batch_size, 1, seqlen_k, 576, heads, 1);
  p.head_dim_v = 512;
  p.page_table.data = numbers, p.page_table.batch_stride = seqlen_k / 64;
  p.page_size = 64, p.num_pages = batch_size * seqlen_k / 64;
  p.k.batch_stride = 64 * p.k.row_stride;
  p.v = p.k;
  p.seqused_k = numbers;
  return p;
}

// Heads of 257 to 576 columns. Where V is K's first columns they are read once.
void wide_heads() {
  for (const DeviceInfo& device : gpus()) {
    const Plan few = dlattn::plan(latents(8, 4096, 16), device, force("decode"));
    CHECK(dlattn::plan(latents(8, 4096, 16), device).kernel ==
          (device.compute_major == 9 ? "sm90_latent" : "decode"));
    CHECK_EQ(few.head_dim_tile, 576);
    CHECK(few.variant_name == std::string("rows16"));
  }
  const Plan many = dlattn::plan(latents(8, 4096, 128), h200, force("decode"));
  CHECK(many.variant_name == std::string("rows32"));
  CHECK(dlattn::plan(latents(8, 4096, 128), h200).kernel == "sm90_latent");
  const Plan latent = dlattn::plan(latents(1, 65536, 16), h200, force("decode"));
  CHECK_EQ(latent.workspace_bytes, decode::workspace_map(1, 2 * latent.grid, 16, 512).total);
  AttentionParams p = latents(1, 65536, 16);
  p.v.batch_stride *= 2;
  CHECK(dlattn::plan(p, h200, force("decode")).predicted_ns > 1.5 * latent.predicted_ns);
  p = latents(1, 4096, 16), p.head_dim_v = 520;
  CHECK_THROWS(dlattn::plan(p, h200, force("decode")), UnsupportedError,
               "no kernel can run this: decode: head_dim of v is 520; accepted: up to 512");
  // Elsewhere than in caches nobody has timed it: others go before.
  CHECK(dlattn::plan(problem(1, 1, 8192, 512), h200).kernel != "decode");
  CHECK(dlattn::plan(problem(1, 1, 8192, 512), h200, force("decode")).kernel == "decode");
}

// The same with keys of 8 bits.
void wide_heads_of_8_bits() {
  static const float scale = 0.5f;
  for (const DType dtype : {DType::kInt8, DType::kFloat8E4M3}) {
    const auto in_8_bits = [dtype](AttentionParams p) {
      p.k.dtype = p.v.dtype = dtype;
      p.k_descale.data = p.v_descale.data = &scale;
      return p;
    };
    for (const DeviceInfo& device : gpus()) {
      const Plan plan = dlattn::plan(in_8_bits(latents(8, 4096, 16)), device);
      const bool narrow = device.compute_major == 9 && dtype == DType::kFloat8E4M3;
      CHECK(plan.kernel == (narrow ? "sm90_latent" : "decode"));
      CHECK(plan.dtype == dtype);
      CHECK_EQ(plan.head_dim_tile, 576);
      CHECK(plan.variant_name == std::string("rows16"));
      CHECK(plan.predicted_ns <
            dlattn::plan(latents(8, 4096, 16), device, force("decode")).predicted_ns);
    }
    CHECK(dlattn::plan(in_8_bits(latents(8, 4096, 128)), h200).variant_name ==
          std::string("rows32"));
    AttentionParams p = in_8_bits(latents(8, 4096, 16));
    p.head_dim_v = 528;
    CHECK_THROWS(dlattn::plan(p, h200, force("decode")), UnsupportedError,
                 "no kernel can run this: decode: head_dim of v is 528; accepted: up to 512");
    p.head_dim_v = 512, p.k.row_stride += 8, p.v.row_stride += 8;
    check_copies(p);
  }
}

// A thread block adds up at most so many keys of a row block, whatever the lengths are.
void keys_of_wide_heads() {
  const std::int64_t most = tile::kMostKeys;
  CHECK_EQ(dlattn::plan(latents(1, 8 * most, 16), h200).split_size, 0);
  const Plan many = dlattn::plan(latents(512, 2 * most, 16), h200);
  CHECK_EQ(many.split_size, most);
  CHECK_EQ(many.num_splits, 2);
  Options options = force("decode");
  options.num_splits = 2;
  CHECK_EQ(dlattn::plan(latents(1, 2 * most, 16), h200, options).num_splits, 2);
  CHECK_THROWS(dlattn::plan(latents(1, 4 * most, 16), h200, options), UnsupportedError,
               "no kernel can run this: decode: seqlen_k is 524288; accepted: up to 131072 in a "
               "part");
}

// Devices of compute capability 8.9 and 8.6.
void shared_memory() {
  for (const int tile : {64, 128, 256, 576}) {
    for (int variant = 0; variant < decode::kNumVariants; ++variant) {
      if (!decode::has_variant(tile, variant)) continue;
      for (const int bytes : decode::kKeyBytes)
        CHECK(decode::tile_config(tile, variant, bytes).smem_bytes <= 101376);
    }
  }
  for (const DeviceInfo& device : gpus())
    CHECK(supported(problem(2, 3, 1000), device, force("decode")).ok);
}

}  // namespace

int main() {
  work_is_partitioned();
  lengths_on_the_device();
  varlen_queries_over_caches();
  modified_scores();
  many_rows();
  without_a_workspace();
  workspace_of_the_call();
  clusters();
  splits();
  wrong_splits();
  caches();
  caches_of_8_bits();
  refused();
  wide_heads();
  wide_heads_of_8_bits();
  keys_of_wide_heads();
  shared_memory();
  return test::summary();
}
