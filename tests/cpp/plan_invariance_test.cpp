// Options::batch_invariant: of random features on made-up GPUs, what a plan chooses must be the
// same whatever the lengths, the batch and the numbers of heads are. Needs no GPU and no CUDA.
#include <algorithm>
#include <cstdio>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "core/plan/plan.h"
#include "random_problem.h"

using namespace dlattn;
using namespace test;

namespace {

// The choices of a plan that decide about the bits of a row.
struct Choice {
  std::string kernel;
  int variant, packed_heads, block_m, block_n, num_warps, num_stages, copy_bytes, cluster_size;
  std::int64_t split_size;

  explicit Choice(const Plan& plan)
      : kernel(plan.kernel),
        variant(plan.variant),
        packed_heads(plan.packed_heads),
        block_m(plan.block_m),
        block_n(plan.block_n),
        num_warps(plan.num_warps),
        num_stages(plan.num_stages),
        copy_bytes(plan.copy_bytes),
        cluster_size(plan.cluster_size),
        split_size(plan.split_size) {}

  std::string text() const {
    std::ostringstream out;
    out << kernel << " variant " << variant << " packed_heads " << packed_heads << " tile "
        << block_m << " x " << block_n << " warps " << num_warps << " stages " << num_stages
        << " copy_bytes " << copy_bytes << " cluster " << cluster_size << " split_size "
        << split_size;
    return out.str();
  }
};

// Problems of the same features, of fixed and of variable length: all of one choice. Each way of
// calling serves all of them or none.
void one_choice() {
  int accepted = 0, by_decode = 0, by_sm90 = 0, of_caches = 0, matters = 0;
  for (unsigned seed = 0; seed < 4000; ++seed) {
    Random random(seed);
    Features f = random_features(random);
    set_alignment(random, &f.params);
    const std::string at_seed = "seed " + std::to_string(seed) + ": ";
    std::string first, first_problem, answers[2];
    bool fastest_differs = false;
    std::string fastest;
    for (int i = 0; i < 16; ++i) {
      const bool varlen = i % 2 == 1;
      const AttentionParams p = random_problem(random, f, varlen);
      const std::vector<std::string> reasons = core::refusals(p, f.device, f.options);
      const std::string answer = reasons.empty() ? "served" : "refused";
      std::string& of_kind = answers[varlen ? 1 : 0];
      if (of_kind.empty()) of_kind = answer;
      CHECK_FOR(answer == of_kind, at_seed + describe_problem(p) + ", which is " + answer +
                                       (reasons.empty() ? "" : ": " + reasons[0]));
      if (!reasons.empty()) continue;
      const Plan plan = core::make_plan(p, f.device, f.options);
      const std::string choice = Choice(plan).text();
      if (first.empty()) first = choice, first_problem = describe_problem(p);
      CHECK_FOR(choice == first, at_seed + describe_problem(p) + ": " + choice + ", but " +
                                     first_problem + ": " + first);
      CHECK(plan.predicted_ns > 0.0);
      // Few rows have no kernel of their own, but with keys in a cache or as the caller asks.
      if (!f.cache && f.options.kernel == core::kAuto && f.options.split_size == 0)
        CHECK(plan.kernel != "decode");
      ++accepted, by_decode += plan.kernel == "decode", by_sm90 += plan.kernel == "sm90";
      of_caches += f.cache;
      Options any = f.options;
      any.batch_invariant = false;
      const std::string other = Choice(core::make_plan(p, f.device, any)).text();
      if (fastest.empty()) fastest = other;
      fastest_differs |= other != fastest;
    }
    matters += fastest_differs;
  }
  // The test is about something: all of these occur, and mostly lengths would decide.
  CHECK(accepted > 10000);
  CHECK(by_decode > 3000);
  CHECK(by_sm90 > 1000);
  CHECK(of_caches > 2000);
  CHECK(matters > 500);
}

// Without it, the kernel taken is the one of those that serve a problem which is predicted to be
// the fastest, with its margin, whatever the problem.
void least_of_all() {
  int problems = 0, with_choice = 0;
  for (unsigned seed = 0; seed < 1500; ++seed) {
    Random random(seed);
    Features f = random_features(random);
    set_alignment(random, &f.params);
    f.options.batch_invariant = false, f.options.kernel = core::kAuto;
    f.options.variant = nullptr;
    const AttentionParams p = random_problem(random, f, seed % 2 == 1);
    Plan taken, other;
    const bool served = core::find_plan(p, f.device, f.options, &taken);
    int kernels = 0;
    for (const std::string_view name : kernel_names()) {
      if (name == core::kAuto) continue;
      f.options.kernel = name;
      if (!core::find_plan(p, f.device, f.options, &other)) continue;
      ++kernels;
      CHECK_FOR(
          served && taken.margin * taken.predicted_ns <= other.margin * other.predicted_ns,
          "seed " + std::to_string(seed) + ": " + describe_problem(p) + ": " + std::string(name));
    }
    CHECK(served == (kernels > 0));
    problems += served, with_choice += kernels > 1;
  }
  CHECK(problems > 1000);
  CHECK(with_choice > 700);
}

Options invariant() {
  Options options;
  options.batch_invariant = true;
  return options;
}

// A fault that a caller saw: alone a few rows were decode's, and in a batch sm90's.
void few_rows_with_softcap() {
  const DeviceInfo h200 = test::gpu("H200", 9, 0, 132, 232448);
  constexpr std::int64_t kLengths[][2] = {{1, 300},   {17, 17},   {300, 511},
                                          {511, 300}, {64, 1024}, {130, 129}};
  AttentionParams p = test::problem(DType::kBFloat16, 64);
  p.num_heads_kv = 2, p.softcap = 9.0, p.window_left = 70, p.window_right = 5;
  p.k.row_stride = p.v.row_stride = 2 * 64;
  AttentionParams pack = p;
  pack.batch_size = 6, pack.cu_seqlens_q = pack.cu_seqlens_k = list;
  for (const auto& lengths : kLengths) {
    pack.total_q += lengths[0], pack.seqlen_q = std::max(pack.seqlen_q, lengths[0]);
    pack.total_k += lengths[1], pack.seqlen_k = std::max(pack.seqlen_k, lengths[1]);
  }
  const std::string of_pack = Choice(core::make_plan(pack, h200, invariant())).text();
  for (const auto& lengths : kLengths) {
    p.batch_size = 1, p.seqlen_q = lengths[0], p.seqlen_k = lengths[1];
    const std::string alone = Choice(core::make_plan(p, h200, invariant())).text();
    CHECK_FOR(alone == of_pack, alone + ", but the pack " + of_pack);
  }
}

// The rows that count are all of a call. Where a stride between sequences moves them off 16 bytes,
// the choice is that for a sequence alone whose rows begin so, not that for one whose rows are
// aligned. The same stride beside one sequence is that of no row.
void alignment_of_rows() {
  const DeviceInfo h200 = test::gpu("H200", 9, 0, 132, 232448);
  int others = 0;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const DType of_cache : {dtype, DType::kInt8, DType::kFloat8E4M3}) {
      for (const char* const keys : {"sequences", "lengths", "varlen", "entries", "pages"}) {
        const std::string_view kind = keys;
        AttentionParams alone = test::problem(dtype, 128);
        alone.seqlen_q = 1, alone.batch_size = 1;
        alone.k.dtype = alone.v.dtype = of_cache;
        if (kind == "lengths") alone.seqused_k = list;
        if (kind == "varlen") alone.cu_seqlens_q = list, alone.total_q = 1, alone.seqused_k = list;
        if (kind == "entries") alone.cache_batch_idx = list, alone.cache_batch_size = 20;
        if (kind == "pages")
          alone.page_table.data = list, alone.page_size = 16, alone.num_pages = 9999;
        if (kind == "sequences" && of_cache != dtype) continue;
        AttentionParams batch = alone;
        batch.batch_size = 17;
        if (kind == "varlen") batch.total_q = 17;
        std::int64_t& stride = kind == "varlen" ? batch.q.row_stride : batch.q.batch_stride;
        std::int64_t& of_one = kind == "varlen" ? alone.q.row_stride : alone.q.batch_stride;
        const std::string aligned = Choice(core::make_plan(alone, h200, invariant())).text();
        for (const std::int64_t elements : {1, 2, 4}) {
          stride = of_one = 8 * 128 + elements;
          const std::string of_batch = Choice(core::make_plan(batch, h200, invariant())).text();
          AttentionParams moved = alone;
          moved.q.data = static_cast<const char*>(alone.q.data) + 2 * elements;
          const std::string of_moved = Choice(core::make_plan(moved, h200, invariant())).text();
          const std::string of_alone = Choice(core::make_plan(alone, h200, invariant())).text();
          CHECK_FOR(of_batch == of_moved, of_batch + ", but alone, as aligned, " + of_moved);
          CHECK_FOR(of_alone == aligned, of_alone + ", but of contiguous rows " + aligned);
          others += of_batch != aligned;
        }
      }
    }
  }
  CHECK(others > 50);
}

// A refusal has each family's reason once, though more than one problem is planned.
void reasons_once() {
  int refused = 0;
  for (unsigned seed = 0; seed < 3000; ++seed) {
    Random random(seed);
    Features f = random_features(random);
    set_alignment(random, &f.params);
    f.options.batch_invariant = true, f.options.kernel = core::kAuto;
    f.options.variant = nullptr;
    const AttentionParams p = random_problem(random, f, false);
    const std::vector<std::string> reasons = core::refusals(p, f.device, f.options);
    const std::set<std::string> different(reasons.begin(), reasons.end());
    CHECK_FOR(different.size() == reasons.size(),
              "seed " + std::to_string(seed) + ": " + describe_problem(p));
    refused += !reasons.empty();
  }
  CHECK(refused > 20);
}

// Beyond the limits of the kernel that is taken for all lengths there is no other one.
void beyond_limits() {
  const DeviceInfo h200 = test::gpu("H200", 9, 0, 132, 232448);
  const DeviceInfo l4 = test::gpu("L4", 8, 9, 58, 101376);
  AttentionParams p = test::problem(DType::kFloat16, 128);
  p.seqlen_k = 200000;
  CHECK(core::make_plan(p, h200, {}).kernel == "wmma");
  CHECK_THROWS(core::make_plan(p, h200, invariant()), UnsupportedError,
               "no kernel can run this: sm90: seqlen_k is 200000; accepted: up to 131072; with "
               "batch_invariant no other kernel is taken");
  CHECK_THROWS(core::make_plan(p, l4, invariant()), UnsupportedError,
               "no kernel can run this: wmma: variant narrow: seqlen_k is 200000; accepted: up to "
               "131072; with batch_invariant no other kernel is taken");
  // By name all sequences may have a kernel for any length.
  Options general = invariant();
  general.kernel = "wmma", general.variant = "general";
  for (const bool varlen : {false, true}) {
    p.cu_seqlens_q = p.cu_seqlens_k = varlen ? list : nullptr;
    p.total_q = p.total_k = varlen ? 400000 : 0;
    CHECK(core::make_plan(p, l4, general).variant_name == std::string("general"));
  }
  // Strides that TMA takes of one way of calling alone.
  p.seqlen_k = 2048;
  p.k.head_stride = std::int64_t{1} << 34;
  CHECK_THROWS(core::make_plan(p, h200, invariant()), UnsupportedError,
               "no kernel can run this: sm90: k has a head stride of 34359738368 bytes; accepted: "
               "multiples of 16 from 0 to 17179869168; with batch_invariant no other kernel is "
               "taken");
  // Where the caller names all, the limits are those of what is named.
  Options single_pass = invariant();
  single_pass.kernel = "wmma", single_pass.variant = "single_pass";
  p = test::problem(DType::kFloat16, 64);
  const DeviceInfo a100 = test::gpu("A100", 8, 0, 108, 166912);
  CHECK(!core::refusals(p, a100, single_pass).empty());
  p.seqlen_k = 256;
  CHECK(core::refusals(p, a100, single_pass).empty());
  // A problem that no kernel serves is refused for the tensors that it has.
  p = test::problem(DType::kFloat16, 64);
  p.k.data = static_cast<const char*>(p.k.data) + 2;
  Options decode = invariant();
  decode.kernel = "decode";
  CHECK_THROWS(core::make_plan(p, l4, decode), UnsupportedError,
               "no kernel can run this: decode: rows of q, k and v are aligned to 2 bytes; "
               "accepted: 16");
  decode.kernel = "none";
  CHECK(core::refusals(p, l4, decode)[0].find("kernel is none; accepted: ") == 0);
}

}  // namespace

int main() {
  one_choice();
  least_of_all();
  few_rows_with_softcap();
  alignment_of_rows();
  reasons_once();
  beyond_limits();
  return test::summary();
}
