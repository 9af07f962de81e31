// Gradients on the CPU, for every instruction set, against the formulas of backward.h computed in
// float64 from the same out and lse.
#include <cstring>
#include <string>

#include "backward_problem.h"
#include "check.h"
#include "core/backend.h"
#include "core/plan/plan.h"
#include "core/validate/validate.h"

using namespace dlattn;
using test::Backward;
using test::Spec;

namespace {

void run(Backward& backward, const char* isa, int num_threads) {
  Options options;
  options.num_threads = num_threads;
  core::validate(backward.params);
  cpu::backward(backward.params, core::make_plan(backward.params, test::cpu_device(isa), options));
}

void check(const Spec& spec, unsigned bias_dims = 0) {
  const Backward first(spec, bias_dims);
  const test::ExactGradients exact = test::exact_gradients(first);
  const test::Gradients plain = test::plain_gradients(first);
  for (const char* isa : test::isas()) {
    Backward one(spec, bias_dims), other(spec, bias_dims);
    run(one, isa, 1), run(other, isa, 3);
    for (int n = 0; n < test::kGradients; ++n) {
      const std::size_t bytes = static_cast<std::size_t>(one.results[n].size()) *
                                (n > test::kDbias ? 4 : size_of(spec.dtype));
      CHECK(bytes == 0 || std::memcmp(one.results[n].data(), other.results[n].data(), bytes) == 0);
    }
    const std::string wrong = test::verdict(one, exact, plain);
    CHECK_FOR(wrong.empty(), std::string(isa) + ": " + wrong);
  }
}

Spec everything() {
  Spec spec;
  spec.num_heads = 2, spec.num_heads_kv = 1;
  spec.head_dim = 20, spec.head_dim_v = 9;
  spec.seqlen_q = 70, spec.seqlen_k = 105;
  spec.softcap = 3.0;
  spec.causal = Causal::kBottomRight;
  spec.window_left = 60;
  spec.bias = spec.bias_broadcast = spec.mask = spec.alibi = spec.sinks = true;
  return spec;
}

void dtypes() {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const test::Layout layout : {test::Layout::kBshd, test::Layout::kPadded}) {
      Spec spec;
      spec.dtype = dtype, spec.layout = layout;
      check(spec);
      spec = everything();
      spec.dtype = dtype, spec.layout = layout;
      check(spec);
    }
  }
}

void head_dims() {
  for (const std::int64_t head_dim : {1, 7, 64, 129, 256}) {
    Spec spec;
    spec.seqlen_q = 9, spec.seqlen_k = 14;
    spec.head_dim = head_dim, spec.head_dim_v = 257 - head_dim;
    check(spec);
  }
}

// Each dimension along which bias may have one element, with the others.
void shapes_of_bias() {
  for (unsigned single = 0; single < 16; ++single) {
    Spec spec = everything();
    spec.bias_fp32 = true;
    spec.alibi = spec.sinks = false;
    check(spec, single);
  }
}

void features() {
  Spec spec;
  for (const Causal causal : {Causal::kTopLeft, Causal::kBottomRight}) {
    spec.causal = causal;
    spec.seqlen_q = 90, spec.seqlen_k = 50;  // with bottom-right, rows that see nothing
    check(spec);
    spec.sinks = !spec.sinks;
    check(spec);
  }
  spec = Spec();
  spec.window_left = 5, spec.window_right = 3;
  spec.seqlen_k = 300;  // keys that nobody sees
  check(spec);
  spec = Spec();
  spec.num_heads_kv = 1;
  check(spec);
}

void variable_length() {
  Spec spec;
  spec.seqlen_q = spec.seqlen_k = 0;
  spec.lengths_q = {5, 0, 70, 1, 33};
  spec.lengths_k = {9, 4, 120, 0, 20};
  check(spec);
  spec.layout = test::Layout::kPadded;
  spec.causal = Causal::kBottomRight;
  spec.used_k = {9, 0, 100, 0, 7};
  spec.bias = spec.mask = spec.alibi = spec.sinks = true;
  check(spec);
}

void nothing_to_sum() {
  for (const bool queries : {false, true}) {
    Spec spec;
    (queries ? spec.seqlen_k : spec.seqlen_q) = 0;
    spec.sinks = true;
    check(spec);
  }
}

// Each gradient alone has the bits that it has with the others.
void alone(const Spec& spec) {
  Backward all(spec);
  run(all, "portable", 2);
  for (int n = 0; n < test::kGradients; ++n) {
    Backward one(spec);
    if (one.results[n].size() == 0) continue;
    BackwardParams& b = one.params;
    if (n != test::kDq) b.dq.data = nullptr;
    if (n != test::kDk) b.dk.data = nullptr;
    if (n != test::kDv) b.dv.data = nullptr;
    if (n != test::kDbias) b.dbias.data = nullptr;
    if (n != test::kDslopes) b.dalibi_slopes.data = nullptr;
    if (n != test::kDsinks) b.dsinks.data = nullptr;
    run(one, "portable", 2);
    for (std::int64_t i = 0; i < one.results[n].size(); ++i)
      CHECK_EQ(one.results[n].get(i), all.results[n].get(i));
  }
}

}  // namespace

int main() {
  dtypes();
  head_dims();
  shapes_of_bias();
  features();
  variable_length();
  nothing_to_sum();
  Spec spec = everything();
  alone(spec);
  spec.alibi = false;  // dq, dk and dv together: by parts of a head
  alone(spec);
  spec.batch_size = 8, spec.num_heads_kv = 2;  // and by whole heads
  alone(spec);
  return test::summary();
}
