// Varlen batches on the CPU: results as in problem.h's formula, and the checks of cu_seqlens and
// seqused_k.
#include <cmath>

#include "check.h"
#include "core/backend.h"
#include "problem.h"

using namespace dlattn;
using test::Buffer;
using test::Problem;
using test::Spec;

namespace {

Spec packed() {
  Spec spec;
  spec.seqlen_q = spec.seqlen_k = 0;
  spec.lengths_q = {5, 0, 70, 1, 33};
  spec.lengths_k = {9, 4, 120, 0, 20};  // a sequence without keys, one with fewer keys than queries
  return spec;
}

void check(const Spec& spec) {
  Problem problem(spec);
  const test::Reference reference(problem);
  for (const char* isa : test::isas()) {
    const std::string wrong = test::run_and_judge(problem, reference, isa, 2);
    CHECK_FOR(wrong.empty(), wrong);
  }
}

void results() {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const Causal causal : {Causal::kNone, Causal::kBottomRight, Causal::kTopLeft}) {
      Spec spec = packed();
      spec.dtype = dtype;
      spec.causal = causal;
      check(spec);
      spec.layout = test::Layout::kPadded;
      spec.used_k = {9, 0, 100, 0, 7};
      check(spec);
      spec.window_left = 30;
      spec.softcap = 4.0;
      spec.alibi = spec.sinks = spec.bias = spec.mask = true;
      check(spec);
    }
  }
  Spec longer = packed();  // max_seqlen may exceed every length
  longer.seqlen_q = 200;
  longer.seqlen_k = 300;
  check(longer);
  Spec split;  // few queries, many keys: the plan splits the keys
  split.seqlen_q = split.seqlen_k = 0;
  split.lengths_q = {1, 3};
  split.lengths_k = {2100, 40};
  CHECK(plan(Problem(split).params, test::cpu_device("portable")).num_splits > 1);
  check(split);
  Spec nothing = packed();
  nothing.lengths_q = {0, 0};
  nothing.lengths_k = {3, 4};
  check(nothing);
}

void refusals() {
  Spec spec = packed();
  spec.used_k = {9, 0, 100, 0, 7};
  const auto refuses = [&](auto change, const std::string& message) {
    Problem problem(spec);
    change(problem);
    CHECK_THROWS(forward(problem.params), UnsupportedError, message);
    CHECK_EQ(problem.out.stray_writes(), 0);
    for (std::int64_t i = 0; i < problem.out.size(); ++i)
      CHECK(problem.out.get(i) != problem.out.get(i));  // NaN still
  };
  refuses([](Problem& p) { p.cu_seqlens_q[0] = -2147483647 - 1; },
          "cu_seqlens_q[0] is -2147483648; accepted: 0 or more");
  refuses([](Problem& p) { p.cu_seqlens_k[0] = -1; }, "cu_seqlens_k[0] is -1; accepted: 0 or more");
  refuses([](Problem& p) { p.cu_seqlens_q[1] = 6; },
          "cu_seqlens_q[2] is 5, less than cu_seqlens_q[1] = 6; accepted: offsets that do not "
          "decrease");
  refuses([](Problem& p) { p.cu_seqlens_k[5] = 100; },
          "cu_seqlens_k[5] is 100, less than cu_seqlens_k[4] = 133; accepted: offsets that do not "
          "decrease");
  refuses([](Problem& p) { p.cu_seqlens_q[5] += 1; },
          "cu_seqlens_q[5] is 110; accepted: up to the 109 tokens of the tensor");
  refuses([](Problem& p) { p.params.total_k -= 1; },
          "cu_seqlens_k[5] is 153; accepted: up to the 152 tokens of the tensor");
  refuses([](Problem& p) { p.params.seqlen_q = 0; },
          "cu_seqlens_q: sequence 0 has 5 tokens; accepted: up to max_seqlen_q = 0");
  refuses([](Problem& p) { p.params.seqlen_q = 69; },
          "cu_seqlens_q: sequence 2 has 70 tokens; accepted: up to max_seqlen_q = 69");
  refuses([](Problem& p) { p.params.seqlen_k = 119; },
          "cu_seqlens_k: sequence 2 has 120 tokens; accepted: up to max_seqlen_k = 119");
  refuses([](Problem& p) { p.spec.used_k[2] = 121; },
          "seqused_k[2] is 121; accepted: 0 to 120, the length of the sequence");
  refuses([](Problem& p) { p.spec.used_k[0] = -1; },
          "seqused_k[0] is -1; accepted: 0 to 9, the length of the sequence");
  refuses([](Problem& p) { p.params.batch_size = 0; },
          "batch_size is 0, by a cu_seqlens_q of one offset, but q has 109 tokens; accepted: at "
          "least 1 sequence, or a q without tokens");
}

// Offsets into the middle of a larger batch: as the same sequences alone, and not a byte beside
// them.
void slices() {
  for (const DType dtype : {DType::kFloat16, DType::kFloat64}) {
    Spec spec = packed();
    spec.dtype = dtype;
    spec.alibi = spec.sinks = spec.lse = true;
    Problem whole(spec);
    Options options;
    options.batch_invariant = true;  // the same bits, whatever else is in the batch
    for (const char* isa : test::isas()) {
      const auto run = [&](AttentionParams p) {
        cpu::forward(p, plan(p, test::cpu_device(isa), options));
      };
      whole.poison();
      run(whole.params);
      const Buffer all = whole.out, all_lse = whole.lse;
      whole.poison();
      AttentionParams slice = whole.params;
      slice.batch_size = 2;  // sequences 2 and 3
      slice.cu_seqlens_q += 2;
      slice.cu_seqlens_k += 2;
      slice.alibi_slopes.data += 2 * slice.alibi_slopes.batch_stride;
      run(slice);
      for (std::int64_t i = 0; i < slice.total_q; ++i) {
        const bool inside = i >= whole.cu_seqlens_q[2] && i < whole.cu_seqlens_q[4];
        for (std::int64_t at = i * slice.out.row_stride; at < (i + 1) * slice.out.row_stride; ++at)
          CHECK(inside ? whole.out.get(at) == all.get(at) : std::isnan(whole.out.get(at)));
        for (std::int64_t h = 0; h < slice.num_heads; ++h) {
          const double lse = whole.lse.get(h * slice.lse.head_stride + i);
          CHECK(inside ? lse == all_lse.get(h * slice.lse.head_stride + i) : std::isnan(lse));
        }
      }
    }
  }
}

// A longest sequence that is none of these costs nothing and changes nothing: tasks are of the
// lengths that there are.
void longest_is_an_upper_bound() {
  Spec spec;
  spec.seqlen_q = spec.seqlen_k = 0;
  spec.lengths_q = spec.lengths_k = std::vector<std::int32_t>(64, 1);
  spec.lengths_q[7] = 90;
  spec.lengths_k[9] = 300;
  spec.causal = Causal::kBottomRight;
  Problem problem(spec);
  const auto results = [&](std::int64_t longest) {
    problem.params.seqlen_q = problem.params.seqlen_k = longest;
    problem.poison();
    Options options;
    options.batch_invariant = true;
    cpu::forward(problem.params, plan(problem.params, test::cpu_device("portable"), options));
    std::vector<double> all;
    for (std::int64_t i = 0; i < problem.out.size(); ++i) all.push_back(problem.out.get(i));
    return all;
  };
  CHECK(results(300) == results(1 << 30));
}

}  // namespace

int main() {
  results();
  refusals();
  slices();
  longest_is_an_upper_bound();
  return test::summary();
}
