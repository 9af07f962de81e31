// Tests the CPU kernels at the edges: empty problems, infinities and NaN, thread counts, plans,
// environment.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "check.h"
#include "core/backend.h"
#include "core/plan/plan.h"
#include "problem.h"

using namespace dlattn;
using test::Problem;
using test::Reference;
using test::Spec;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNaN = std::nan("");

void run(Problem& problem, const char* isa, int num_threads = 2) {
  Options options;
  options.num_threads = num_threads;
  cpu::forward(problem.params, core::make_plan(problem.params, test::cpu_device(isa), options));
}

// Judges what `change` made of a problem, on every instruction set.
template <typename Change>
void check_changed(Spec spec, Change change) {
  Problem problem(spec);
  change(problem);
  const Reference reference(problem);
  for (const char* isa : test::isas()) {
    const std::string wrong = test::run_and_judge(problem, reference, isa, 2);
    CHECK_FOR(wrong.empty(), wrong);
  }
}

void non_finite_inputs() {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    Spec spec;
    spec.dtype = dtype;
    spec.seqlen_q = 20;
    spec.seqlen_k = 130;
    for (const double bad : {kNaN, kInf, -kInf}) {
      check_changed(spec, [&](Problem& p) { p.q.set(3 * p.params.q.row_stride + 5, bad); });
      check_changed(spec, [&](Problem& p) { p.v.set(100 * p.params.v.row_stride + 5, bad); });
    }
    check_changed(spec, [&](Problem& p) { p.k.set(100 * p.params.k.row_stride + 5, kNaN); });
    // A key at infinity scores plus or minus infinity by the sign of q; only minus infinity is a
    // weight.
    check_changed(spec, [&](Problem& p) {
      for (std::int64_t i = 0; i < p.q.size(); ++i) p.q.set(i, std::fabs(p.q.get(i)) + 0.1);
      p.k.set(100 * p.params.k.row_stride + 5, -kInf);
    });
  }
}

void infinite_bias() {
  Spec spec;
  spec.bias = true;
  spec.sinks = false;
  for (const bool sinks : {false, true}) {
    spec.sinks = sinks;
    // One row whose keys are all at -inf sees nothing; others lose some keys.
    check_changed(spec, [](Problem& p) {
      for (std::int64_t j = 0; j < p.params.seqlen_k; ++j)
        p.bias.set(2 * p.params.bias.row_stride + j, -kInf);
      for (std::int64_t j = 0; j < p.params.seqlen_k; j += 3)
        p.bias.set(4 * p.params.bias.row_stride + j, -kInf);
    });
  }
}

void infinite_sinks() {
  Spec spec;
  spec.sinks = true;
  check_changed(spec, [](Problem& p) { p.sinks.set(0, -kInf); });
  check_changed(spec, [](Problem& p) { p.sinks.set(0, 200.0); });
  check_changed(spec, [](Problem& p) { p.sinks.set(0, -200.0); });
}

// Values that no row may see do not reach a row that sees nothing.
void nan_behind_a_mask() {
  Spec spec;
  spec.mask = true;
  check_changed(spec, [](Problem& p) {
    for (std::int64_t j = 0; j < p.params.seqlen_k; ++j) p.mask[j] = 0;  // row 0 of head 0, batch 0
  });
  spec.mask = false;
  spec.seqlen_q = 200;
  spec.seqlen_k = 10;
  spec.causal = Causal::kBottomRight;  // rows 0 .. 189 see nothing
  Problem problem(spec);
  for (std::int64_t i = 0; i < problem.v.size(); ++i) problem.v.set(i, kNaN);
  for (const char* isa : test::isas()) {
    problem.poison();
    run(problem, isa);
    for (std::int64_t i = 0; i < 190; ++i)
      CHECK(problem.out.get(problem.out_index(0, i, 0, 0)) == 0.0);
    CHECK(std::isnan(problem.out.get(problem.out_index(0, 190, 0, 0))));
  }
}

void large_scores() {
  Spec spec;
  spec.softmax_scale = 100.0;
  check_changed(spec, [](Problem&) {});
  spec.dtype = DType::kFloat64;
  check_changed(spec, [](Problem&) {});
}

void empty_problems() {
  Spec spec;
  spec.seqlen_k = 0;
  for (const bool sinks : {false, true}) {
    spec.sinks = sinks;
    check_changed(spec,
                  [](Problem& p) { CHECK(plan(p.params, test::cpu_device("portable")).grid > 0); });
  }
  spec.seqlen_k = 5;
  spec.seqlen_q = 0;
  Problem no_queries(spec);
  CHECK_EQ(plan(no_queries.params, test::cpu_device("portable")).grid, 0);
  forward(no_queries.params);
  spec.seqlen_q = 3;
  spec.batch_size = 0;
  Problem no_batch(spec);
  CHECK_EQ(plan(no_batch.params, test::cpu_device("portable")).grid, 0);
  forward(no_batch.params);
}

// The same bits whatever the number of threads.
void determinism() {
  for (const std::int64_t seqlen_q : {1, 150}) {
    Spec spec;
    spec.batch_size = 1;
    spec.num_heads = spec.num_heads_kv = 1;
    spec.seqlen_q = seqlen_q;
    spec.seqlen_k = 3000;
    Problem problem(spec);
    for (const char* isa : test::isas()) {
      std::vector<double> first;
      for (const int threads : {1, 2, 5, 16}) {
        problem.poison();
        run(problem, isa, threads);
        std::vector<double> now;
        for (std::int64_t i = 0; i < problem.out.size(); ++i) now.push_back(problem.out.get(i));
        for (std::int64_t i = 0; i < seqlen_q; ++i) now.push_back(problem.lse.get(i));
        if (first.empty()) first = now;
        CHECK_FOR(now == first, std::string(isa) + ", threads " + std::to_string(threads));
      }
    }
  }
}

// Offsets beyond 2^31 elements: two batch entries whose strides span them, of which only the used
// rows are touched.
void wide_strides() {
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 128;
  Spec spec;
  spec.batch_size = 2;
  spec.dtype = DType::kFloat16;
  spec.num_heads = spec.num_heads_kv = 1;
  spec.seqlen_q = 3;
  spec.seqlen_k = 20;
  Problem near(spec);
  const Reference reference(near);
  const std::int64_t bytes = (kFar + 20 * 32) * 2;
  // calloc of this size maps pages on demand; only a few are ever touched.
  char* memory = static_cast<char*>(std::calloc(1, static_cast<std::size_t>(bytes)));
  if (!memory) {
    std::printf("wide_strides: skipped, %lld bytes of address space are not to be had\n",
                static_cast<long long>(bytes));
    return;
  }
  for (int b = 0; b < 2; ++b) {
    std::memcpy(memory + b * kFar * 2,
                static_cast<const char*>(near.params.k.data) + b * near.params.k.batch_stride * 2,
                20 * 32 * 2);
  }
  near.params.k.data = memory;
  near.params.k.batch_stride = kFar;
  run(near, test::isas().back());
  const test::Errors errors = test::errors_of(near, reference);
  CHECK(errors.out <= 2 * reference.plain_error);
  std::free(memory);
}

void plan_fields() {
  Spec spec;
  spec.batch_size = 2;
  spec.num_heads = 8;
  spec.num_heads_kv = 2;
  spec.seqlen_q = spec.seqlen_k = 300;
  Problem problem(spec);
  for (const char* isa : test::isas()) {
    const Plan plan = dlattn::plan(problem.params, test::cpu_device(isa));
    CHECK(plan.kernel == "cpu");
    CHECK_EQ(std::string(plan.isa) == isa, true);
    CHECK_EQ(plan.head_dim_tile, 0);
    CHECK_EQ(plan.smem_bytes, 0);
    CHECK_EQ(plan.num_threads, 2);
    CHECK_EQ(plan.block_m, 64);
    CHECK(plan.block_n > 0);
    // 4 query heads share a KV head: 1200 rows, 19 tiles of 64, for 2 KV heads and 2 batch entries.
    CHECK_EQ(plan.grid, 19 * 2 * 2 * plan.num_splits);
    CHECK(plan.workspace_bytes > 0);
    Options options;
    options.num_threads = 1;
    const Plan alone = dlattn::plan(problem.params, test::cpu_device(isa), options);
    CHECK_EQ(alone.num_threads, 1);
    CHECK_EQ(alone.workspace_bytes * 2, plan.workspace_bytes);
    options.kernel = "cpu";
    CHECK(dlattn::plan(problem.params, test::cpu_device(isa), options).kernel == "cpu");
    CHECK(supported(problem.params, test::cpu_device(isa), options).ok);
  }
  for (const int wrong : {-1, 4097}) {
    Options options;
    options.num_threads = wrong;
    CHECK_THROWS(
        dlattn::plan(problem.params, test::cpu_device("portable"), options), UnsupportedError,
        "num_threads is " + std::to_string(wrong) + "; accepted: 1 to 4096, or 0 for the default");
  }
  CHECK_THROWS(dlattn::plan(problem.params, test::cpu_device("mmx")), UnsupportedError,
               "isa is \"mmx\", which this processor or this build does not have");
}

// device_info() is what a fresh process sees.
void environment() {
  unsetenv("DLATTN_CPU_ISA");
  unsetenv("DLATTN_NUM_THREADS");
  CHECK_EQ(std::string(cpu::device_info().isa) == test::isas().back(), true);
  CHECK(cpu::device_info().num_threads >= 1);
  for (const char* isa : test::isas()) {
    setenv("DLATTN_CPU_ISA", isa, 1);
    CHECK_EQ(std::string(cpu::device_info().isa) == isa, true);
  }
  setenv("DLATTN_CPU_ISA", "sse9", 1);
  std::string accepted;
  for (std::size_t i = test::isas().size(); i-- > 0;)
    accepted += test::isas()[i] + std::string(i ? ", " : "");
  CHECK_THROWS(cpu::device_info(), UnsupportedError,
               "DLATTN_CPU_ISA is \"sse9\"; accepted on this processor: " + accepted);
  unsetenv("DLATTN_CPU_ISA");
  setenv("DLATTN_NUM_THREADS", "3", 1);
  CHECK_EQ(cpu::device_info().num_threads, 3);
  for (const char* wrong : {"0", "-2", "two", "3x", "5000"}) {
    setenv("DLATTN_NUM_THREADS", wrong, 1);
    CHECK_THROWS(cpu::device_info(), UnsupportedError,
                 std::string("DLATTN_NUM_THREADS is \"") + wrong + "\"; accepted: 1 to 4096");
  }
  unsetenv("DLATTN_NUM_THREADS");
}

}  // namespace

int main() {
  non_finite_inputs();
  infinite_bias();
  infinite_sinks();
  nan_behind_a_mask();
  large_scores();
  empty_problems();
  determinism();
  wide_strides();
  plan_fields();
  environment();
  return test::summary();
}
