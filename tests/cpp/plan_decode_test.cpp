// Plans of decode.
#include <algorithm>
#include <string>

#include "check.h"
#include "core/plan.h"
#include "cuda/forward/decode/traits.h"
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
void dealt() {
  const Plan one = dlattn::plan(problem(1, 1, 8192), h200);
  CHECK(one.kernel == "decode");
  CHECK(one.variant_name == std::string("rows16"));
  CHECK_EQ(one.grid, 2 * 132);
  CHECK_EQ(one.num_splits, 33);
  CHECK_EQ(one.packed_heads, 4);
  CHECK_EQ(one.workspace_bytes, decode::workspace_map(1, one.grid, 16, 128).total);
  const Plan many = dlattn::plan(problem(64, 1, 4096), h200);
  CHECK(many.kernel == "decode");
  CHECK_EQ(many.grid, 64 * 8);
  CHECK_EQ(many.num_splits, 1);
  CHECK_EQ(many.workspace_bytes, 0);
  // A block for each would leave half the device idle.
  CHECK_EQ(dlattn::plan(problem(8, 1, 4096), h200).grid, 2 * 132);
  // No more blocks than have two tiles each.
  CHECK_EQ(dlattn::plan(problem(1, 1, 1024), h200).grid, 1024 / 64 * 8 / 2);
  // Draft tokens: 32 rows.
  CHECK(dlattn::plan(problem(8, 8, 4096), h200).variant_name == std::string("rows32"));
  // Few keys, and many queries, are for others.
  CHECK(dlattn::plan(problem(1, 1, 512, 64, 8, 8), h200).kernel == "wmma");
  CHECK(dlattn::plan(problem(4, 4096, 4096), h200).kernel == "sm90");
}

void without_a_workspace() {
  Options options = force("decode");
  options.allow_workspace = false;
  const Plan plan = dlattn::plan(problem(1, 1, 8192), h200, options);
  CHECK_EQ(plan.grid, 8);
  CHECK_EQ(plan.workspace_bytes, 0);
  options = force("decode");
  options.batch_invariant = true;
  CHECK_EQ(dlattn::plan(problem(1, 1, 8192), h200, options).num_splits, 1);
  CHECK_EQ(dlattn::plan(problem(3, 1, 8192), h200, options).grid, 24);
}

// Of a cache the host knows how long sequences can be, and no family else reads it.
void caches() {
  static const std::int32_t anything[64] = {};
  AttentionParams p = problem(4, 1, 4096);
  p.seqused_k = anything;
  CHECK(dlattn::plan(p, h200).kernel == "decode");
  p.page_table.data = anything, p.page_table.batch_stride = 4096 / 256;
  p.page_size = 256, p.num_pages = 64;
  CHECK(dlattn::plan(p, h200).kernel == "decode");
  CHECK_THROWS(dlattn::plan(p, h200, force("wmma")), UnsupportedError,
               "no kernel can run this: wmma: does not read keys in a cache: page_table is given");
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
  check_refused(problem(1, 1, 64, 264), nothing,
                "head_dim is 264; accepted: multiples of 8 up to 256");
  check_refused(problem(1, 1 << 28, 64), nothing,
                "seqlen_q x heads of a group is 1073741824; accepted: up to 1073740800");
  Options options = force("decode");
  options.variant = "rows8";
  check_refused(p, nothing, "variant is rows8; accepted: rows16, rows32", options);
  options.variant = "rows32";
  check_refused(problem(1, 1, 64, 256), nothing, "variant rows32 has no instance for this head_dim",
                options);
}

// What GPUs of compute capability 8.9 and 8.6 have.
void shared_memory() {
  for (const int tile : {64, 128, 256}) {
    for (int variant = 0; variant < decode::kNumVariants; ++variant) {
      if (decode::has_variant(tile, variant))
        CHECK(decode::tile_config(tile, variant).smem_bytes <= 101376);
    }
  }
  for (const DeviceInfo& device : gpus())
    CHECK(supported(problem(2, 3, 1000), device, force("decode")).ok);
}

}  // namespace

int main() {
  dealt();
  without_a_workspace();
  caches();
  refused();
  shared_memory();
  return test::summary();
}
