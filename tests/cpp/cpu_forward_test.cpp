// The CPU kernels against the plain formula: shapes, layouts, dtypes, features, instruction sets,
// thread counts.
#include <cmath>

#include "check.h"
#include "core/backend.h"
#include "problem.h"

using namespace dlattn;
using test::Layout;
using test::Spec;

namespace {

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

void check(const Spec& spec) {
  test::Problem problem(spec);
  const test::Reference reference(problem);
  const int threads[] = {1, 2, 5};
  int run = 0;
  for (const char* isa : test::isas()) {
    const std::string wrong = test::run_and_judge(problem, reference, isa, threads[run++ % 3]);
    CHECK_FOR(wrong.empty(), wrong);
  }
}

void shapes() {
  // About the edges of tiles (16, 32 and 64 queries; 48 and 96 keys) and of register blocks.
  for (const std::int64_t seqlen_q : {1, 2, 7, 16, 17, 33, 63, 64, 65, 130}) {
    for (const std::int64_t seqlen_k : {1, 5, 47, 48, 49, 95, 96, 97, 200}) {
      Spec spec;
      spec.batch_size = 1;
      spec.num_heads = spec.num_heads_kv = 2;
      spec.head_dim = spec.head_dim_v = 19;
      spec.seqlen_q = seqlen_q;
      spec.seqlen_k = seqlen_k;
      spec.dtype = (seqlen_q + seqlen_k) % 2 ? DType::kFloat32 : DType::kFloat64;
      check(spec);
      spec.causal = Causal::kBottomRight;
      check(spec);
    }
  }
}

void head_dims() {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t head_dim : {1, 2, 15, 16, 31, 64, 80, 96, 128, 256, 300}) {
      Spec spec;
      spec.batch_size = 1;
      spec.num_heads = 2;
      spec.num_heads_kv = 1;
      spec.dtype = dtype;
      spec.head_dim = head_dim;
      spec.head_dim_v = head_dim % 2 ? head_dim + 6 : head_dim;
      check(spec);
      spec.head_dim_v = head_dim > 8 ? head_dim / 3 : 11;
      check(spec);
    }
  }
}

void heads_and_layouts() {
  for (const DType dtype : kDTypes) {
    for (const Layout layout :
         {Layout::kBshd, Layout::kBhsd, Layout::kPadded, Layout::kBroadcast}) {
      for (const std::int64_t num_heads_kv : {1, 2, 3, 6}) {
        Spec spec;
        spec.dtype = dtype;
        spec.layout = layout;
        spec.num_heads = 6;
        spec.num_heads_kv = num_heads_kv;
        spec.seqlen_q = 37;
        spec.seqlen_k = 101;
        spec.head_dim = 24;
        spec.head_dim_v = 40;
        spec.causal = Causal::kBottomRight;
        check(spec);
        spec.seqlen_q = 1;
        check(spec);
      }
    }
  }
}

// Every feature by itself, then by all pairs of a switch on and the rest drawn at random.
void features() {
  std::mt19937 random(7);
  const auto coin = [&](int one_in) { return random() % one_in == 0; };
  for (int round = 0; round < 160; ++round) {
    Spec spec;
    spec.dtype = kDTypes[round % 4];
    spec.batch_size = 1 + random() % 2;
    spec.seqlen_q = 1 + random() % 90;
    spec.seqlen_k = 1 + random() % 130;
    spec.num_heads_kv = 1 + random() % 2;
    spec.num_heads = spec.num_heads_kv * (1 + random() % 3);
    spec.head_dim = 1 + random() % 40;
    spec.head_dim_v = 1 + random() % 40;
    spec.layout = static_cast<Layout>(random() % 4);
    const int alone = round / 4;  // 0 .. 39: the first 13 each have one feature
    const auto on = [&](int feature) { return alone < 13 ? alone == feature : coin(3); };
    if (on(0)) spec.causal = Causal::kBottomRight;
    if (on(1)) spec.causal = Causal::kTopLeft;
    if (on(2)) spec.window_left = random() % 50;
    if (on(3)) spec.window_right = random() % 50;
    if (on(4)) spec.softcap = 0.5 + random() % 20;
    if (on(5)) spec.bias = true;
    if (on(6)) spec.bias = spec.bias_fp32 = true;
    if (on(7)) spec.bias = spec.bias_broadcast = true;
    if (on(8)) spec.mask = true;
    if (on(9)) spec.mask = spec.mask_broadcast = true;
    if (on(10)) spec.alibi = true;
    if (on(11)) spec.sinks = true;
    if (on(12)) spec.lse = false;
    check(spec);
  }
}

void windows() {
  for (const std::int64_t left : {-1, 0, 3, 1000}) {
    for (const std::int64_t right : {-1, 0, 4, 1000}) {
      for (const Causal causal : {Causal::kNone, Causal::kBottomRight, Causal::kTopLeft}) {
        for (const std::int64_t seqlen_k : {20, 110, 250}) {
          Spec spec;
          spec.seqlen_q = 110;
          spec.seqlen_k = seqlen_k;  // shorter than q: the first rows see nothing
          spec.batch_size = 1;
          spec.head_dim = spec.head_dim_v = 8;
          spec.causal = causal;
          spec.window_left = left;
          spec.window_right = right;
          check(spec);
          spec.sinks = true;
          check(spec);
        }
      }
    }
  }
}

void scales() {
  for (const double scale : {0x1p-126, 1e-3, 1.0, 20.0}) {
    Spec spec;
    spec.softmax_scale = scale;
    spec.causal = Causal::kBottomRight;
    check(spec);
    spec.softcap = 5.0;
    check(spec);
  }
}

// Few queries and many keys, so that the plan splits the keys.
void split_keys() {
  std::mt19937 random(11);
  for (int round = 0; round < 24; ++round) {
    Spec spec;
    spec.dtype = kDTypes[round % 4];
    spec.batch_size = 1;
    spec.seqlen_q = 1 + random() % 20;
    spec.seqlen_k = 1024 + random() % 1000;
    spec.num_heads_kv = 1 + random() % 2;
    spec.num_heads = spec.num_heads_kv * (1 + random() % 4);
    spec.head_dim = spec.head_dim_v = 16;
    test::Problem problem(spec);
    CHECK(plan(problem.params, test::cpu_device("portable")).num_splits > 1);
    check(spec);
    spec.causal =
        round % 2 ? Causal::kBottomRight : Causal::kTopLeft;  // top left: most parts see nothing
    spec.window_left = round % 3 ? -1 : 300;
    spec.sinks = round % 5 == 0;
    check(spec);
  }
}

// 8-bit inputs, with and without descales: every dtype of out, each feature that goes with them.
void float8() {
  std::mt19937 random(17);
  constexpr DType kOut[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  for (int round = 0; round < 90; ++round) {
    Spec spec;
    spec.dtype = DType::kFloat8E4M3;
    spec.out_dtype = kOut[round % 3];
    spec.descales = round % 4 != 0;
    spec.q_descale_by_kv_head = round % 4 == 2;
    spec.seqlen_q = 1 + random() % 90;
    spec.seqlen_k = round % 10 ? 1 + random() % 130 : 1100;
    spec.num_heads_kv = 1 + random() % 2;
    spec.num_heads = spec.num_heads_kv * (1 + random() % 3);
    spec.head_dim = 1 + random() % 70;
    spec.head_dim_v = 1 + random() % 70;
    spec.layout = static_cast<Layout>(random() % 4);
    spec.causal = static_cast<Causal>(random() % 3);
    if (round % 3 == 0) spec.window_left = random() % 50;
    if (round % 5 == 0) spec.softcap = 0.5 + random() % 20;
    if (round % 7 == 0) spec.sinks = true;
    if (round % 9 == 0) {
      spec.lengths_q = {3, 0, 40, 17}, spec.lengths_k = {8, 5, 100, 0};
      spec.layout = Layout::kBshd;
    }
    check(spec);
  }
}

// Descales that are no factor of order: rows of their heads are NaN, or are as the definition says.
void odd_descales() {
  Spec spec;
  spec.dtype = DType::kFloat8E4M3;
  spec.out_dtype = DType::kFloat32;
  spec.descales = true;
  spec.batch_size = 1;
  spec.seqlen_q = 5, spec.seqlen_k = 40;
  for (const float odd : {-0.5f, NAN}) {
    for (const bool of_q : {false, true}) {
      test::Problem problem(spec);
      (of_q ? problem.q_descale : problem.k_descale).set(0, odd);
      cpu::forward(problem.params, plan(problem.params, test::cpu_device("portable")));
      for (std::int64_t h = 0; h < spec.num_heads; ++h) {
        const bool hit = of_q ? h == 0 : h < spec.num_heads / spec.num_heads_kv;
        CHECK_EQ(std::isnan(problem.out.get(problem.out_index(0, 2, h, 3))), hit);
        CHECK_EQ(std::isnan(problem.lse.get(problem.lse_index(0, h, 2))), hit);
      }
    }
  }
  test::Problem zero(spec);  // all scores are 0
  zero.k_descale.set(0, 0.0);
  const test::Reference reference(zero);
  for (const char* isa : test::isas()) {
    const std::string wrong = test::run_and_judge(zero, reference, isa, 1);
    CHECK_FOR(wrong.empty(), wrong);
  }
  // A row that sees nothing is 0 whatever the descales are.
  spec.seqlen_k = 3;
  spec.causal = Causal::kBottomRight;
  test::Problem empty(spec);
  empty.q_descale.set(0, NAN), empty.v_descale.set(0, NAN);
  cpu::forward(empty.params, plan(empty.params, test::cpu_device("portable")));
  CHECK_EQ(empty.out.get(empty.out_index(0, 1, 0, 3)), 0.0);
  CHECK_EQ(empty.lse.get(empty.lse_index(0, 0, 1)), -INFINITY);
}

void seed_shape() {
  Spec spec;
  spec.batch_size = 1;
  spec.num_heads = spec.num_heads_kv = 2;
  spec.seqlen_q = spec.seqlen_k = 512;
  spec.head_dim = spec.head_dim_v = 64;
  check(spec);
  spec.causal = Causal::kBottomRight;
  check(spec);
}

}  // namespace

int main() {
  shapes();
  head_dims();
  heads_and_layouts();
  features();
  windows();
  scales();
  split_keys();
  float8();
  odd_descales();
  seed_shape();
  return test::summary();
}
