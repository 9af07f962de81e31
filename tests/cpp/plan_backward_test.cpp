// The plans of backward passes: by scalar, which serves all, only launches that are wanted, with
// those that all families share before and after them; by sm90, deterministic sums.
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "core/plan/plan.h"
#include "cuda/plan/backward_workspace.h"
#include "plan_problems.h"

using namespace dlattn;
using namespace test;

namespace {

char* at(int index) {
  return memory + index * kApart;
}

BackwardParams backward_problem(DType dtype = DType::kFloat16, std::int64_t head_dim = 64) {
  BackwardParams b;
  AttentionParams& p = b.forward;
  p = problem(dtype, head_dim);
  p.lse.data = reinterpret_cast<float*>(at(4));
  p.lse.row_stride = 1, p.lse.head_stride = 2048, p.lse.batch_stride = 8 * 2048;
  b.dout.data = at(5), b.dout.dtype = dtype;
  b.dout.batch_stride = p.out.batch_stride, b.dout.row_stride = p.out.row_stride;
  b.dout.head_stride = p.out.head_stride;
  return b;
}

void want(MutableTensorView* gradient, int index, const TensorView& like) {
  gradient->data = at(index), gradient->dtype = like.dtype;
  gradient->batch_stride = like.batch_stride, gradient->row_stride = like.row_stride;
  gradient->head_stride = like.head_stride;
}

void want_slopes_and_sinks(BackwardParams* b, bool slopes, bool sinks) {
  auto* const numbers = reinterpret_cast<float*>(at(10));
  if (slopes) {
    b->forward.alibi_slopes.data = numbers, b->forward.alibi_slopes.head_stride = 1;
    b->dalibi_slopes.data = numbers + 100, b->dalibi_slopes.head_stride = 1;
  }
  if (sinks) {
    b->forward.sinks.data = numbers + 200, b->forward.sinks.head_stride = 1;
    b->dsinks.data = numbers + 300, b->dsinks.head_stride = 1;
  }
}

Plan plan_by_scalar(const BackwardParams& b) {
  return dlattn::plan(b, gpus()[0], force("scalar"));
}

// Operations, with the variants of those that follow the plan's own.
std::vector<std::string> launches_of(const Plan& plan) {
  std::vector<std::string> names;
  for (int i = 0; i < plan.num_launches(); ++i) {
    const std::string variant = plan.launch(i).variant_name;
    names.push_back(variant.empty() ? to_string(plan.launch(i).operation) : variant);
  }
  return names;
}

void what_is_wanted_is_launched() {
  using Names = std::vector<std::string>;
  BackwardParams b = backward_problem();
  want(&b.dq, 6, b.forward.q);
  CHECK((launches_of(plan_by_scalar(b)) == Names{"delta", "backward"}));
  CHECK(plan_by_scalar(b).grid == 2 * 8 * 32);  // 64 queries a block
  want(&b.dv, 8, b.forward.v);
  CHECK((launches_of(plan_by_scalar(b)) == Names{"delta", "backward", "queries"}));
  want_slopes_and_sinks(&b, true, true);
  CHECK((launches_of(plan_by_scalar(b)) == Names{"delta", "backward", "queries", "reduce"}));
  const Plan all = plan_by_scalar(b);
  CHECK(all.launch(3).grid == 8 + 8);  // slopes are those of all sequences
  CHECK(all.parts_per_head == 32);

  BackwardParams sinks = backward_problem();
  want_slopes_and_sinks(&sinks, false, true);
  CHECK((launches_of(plan_by_scalar(sinks)) == Names{"delta", "backward", "reduce"}));
  CHECK(plan_by_scalar(sinks).grid == 1);  // which has nothing to do
}

// The longest block bounds a causal grid of one wave: sm90 was measured at half of wmma's time.
void causal_grids_of_one_wave() {
  BackwardParams b = backward_problem(DType::kBFloat16);
  AttentionParams& p = b.forward;
  p = problem(DType::kBFloat16, 128);
  p.batch_size = 4, p.num_heads = p.num_heads_kv = 4, p.seqlen_q = p.seqlen_k = 1024;
  p.lse.data = reinterpret_cast<float*>(at(4)), p.lse.row_stride = 1, p.lse.head_stride = 1024;
  p.lse.batch_stride = 4 * 1024, b.dout.batch_stride = p.out.batch_stride;
  b.dout.row_stride = p.out.row_stride, b.dout.head_stride = p.out.head_stride;
  p.causal = Causal::kBottomRight;
  want(&b.dq, 6, p.q), want(&b.dk, 7, p.k), want(&b.dv, 8, p.v);
  const Plan chosen = dlattn::plan(b, gpus().back());
  CHECK_FOR(chosen.kernel == "sm90", describe(chosen));
  const Plan other = dlattn::plan(b, gpus().back(), force("wmma"));
  CHECK(other.predicted_ns > 1.5 * chosen.predicted_ns);
}

struct Sizes {
  std::int64_t batch_size, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim;
};

// Contiguous tensors, with all of dq, dk and dv wanted.
BackwardParams problem_of(const Sizes& x) {
  BackwardParams b = backward_problem(DType::kFloat16, x.head_dim);
  AttentionParams& p = b.forward;
  p.batch_size = x.batch_size, p.num_heads = x.num_heads, p.num_heads_kv = x.num_heads_kv;
  p.seqlen_q = x.seqlen_q, p.seqlen_k = x.seqlen_k;
  const auto lay_out = [&](auto& view, std::int64_t heads, std::int64_t seqlen) {
    view.head_stride = x.head_dim, view.row_stride = heads * x.head_dim;
    view.batch_stride = seqlen * view.row_stride;
  };
  lay_out(p.q, x.num_heads, x.seqlen_q), lay_out(p.out, x.num_heads, x.seqlen_q);
  lay_out(p.k, x.num_heads_kv, x.seqlen_k), lay_out(p.v, x.num_heads_kv, x.seqlen_k);
  lay_out(b.dout, x.num_heads, x.seqlen_q);
  p.lse.head_stride = x.seqlen_q, p.lse.batch_stride = x.num_heads * x.seqlen_q;
  want(&b.dq, 6, p.q), want(&b.dk, 7, p.k), want(&b.dv, 8, p.v);
  return b;
}

// A block of scalar walks alone: few of them were measured at 12 to 59 times the time of tensor
// cores' kernels, and at 1.5 to 6 times with many.
void short_problems_go_to_tensor_cores() {
  for (const Sizes& sizes :
       {Sizes{1, 8, 2, 512, 512, 64}, Sizes{1, 1, 1, 16, 8192, 128}, Sizes{1, 1, 1, 1024, 16, 256},
        Sizes{1, 1, 1, 16, 16, 192}, Sizes{16, 16, 16, 16, 16, 96}}) {
    for (const bool deterministic : {false, true}) {
      for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
        BackwardParams b = problem_of(sizes);
        b.deterministic = deterministic, b.forward.causal = causal;
        for (const DeviceInfo& device : gpus()) {
          const Plan plan = dlattn::plan(b, device);
          CHECK_FOR(plan.kernel != "scalar", describe(plan));
        }
      }
    }
  }
}

// Rows of a bias and a mask that are not aligned to 16 bytes are copied number by number in sm90:
// measured at 52 and 29 us.
void unaligned_scores_go_to_wmma() {
  BackwardParams b = problem_of({1, 1, 1, 1024, 100, 128});
  AttentionParams& p = b.forward;
  p.causal = Causal::kBottomRight;
  p.bias.data = at(9), p.bias.dtype = DType::kFloat16, p.bias.col_stride = 1;
  p.bias.row_stride = p.mask.row_stride = 100;
  p.mask.data = reinterpret_cast<const std::uint8_t*>(at(10)), p.mask.col_stride = 1;
  const Plan plan = dlattn::plan(b, gpus().back());
  CHECK_FOR(plan.kernel == "wmma", describe(plan));
}

// wmma's times on an H200, in microseconds.
void predicted_times_are_those_measured() {
  const struct {
    Sizes sizes;
    Causal causal;
    double us;
  } cases[] = {{{4, 32, 32, 4096, 4096, 64}, Causal::kNone, 4626.0},
               {{1, 32, 32, 16384, 16384, 64}, Causal::kBottomRight, 8672.0},
               {{32, 32, 32, 512, 512, 64}, Causal::kNone, 719.0},
               {{4, 16, 16, 4096, 4096, 128}, Causal::kNone, 4330.0},
               {{32, 16, 16, 512, 512, 128}, Causal::kBottomRight, 542.0},
               {{4, 8, 8, 4096, 4096, 256}, Causal::kNone, 5466.0},
               {{16, 8, 8, 1024, 1024, 256}, Causal::kBottomRight, 879.0},
               {{2, 16, 16, 2048, 2048, 64}, Causal::kNone, 301.0}};
  for (const auto& c : cases) {
    BackwardParams b = problem_of(c.sizes);
    b.forward.causal = c.causal;
    const Plan plan = dlattn::plan(b, gpus().back(), force("wmma"));
    const double ratio = plan.predicted_ns / 1e3 / c.us;
    CHECK_FOR(ratio > 0.85 && ratio < 1.15, describe(plan));
  }
}

// wmma's kernel of dK and dV is the larger one where a GPU has the shared memory.
void wmma_by_shared_memory() {
  for (const DeviceInfo& device : gpus()) {
    for (const int head_dim : {64, 128, 256}) {
      BackwardParams b = backward_problem(DType::kFloat16, head_dim);
      want(&b.dq, 6, b.forward.q), want(&b.dk, 7, b.forward.k), want(&b.dv, 8, b.forward.v);
      const Plan plan = dlattn::plan(b, device, force("wmma"));
      const bool is_large = head_dim > 64 && device.max_smem_per_block == 232448;
      CHECK_FOR(std::string(plan.variant_name) == (is_large ? "large" : "keys"), describe(plan));
      CHECK_FOR(plan.smem_bytes <= device.max_smem_per_block, describe(plan));
    }
  }
}

// Lists may say that sequences of up to so many keys have none at all.
void packs_without_keys_have_a_time() {
  BackwardParams b = backward_problem();
  AttentionParams& p = b.forward;
  const std::int32_t starts[] = {0, 0, 0};
  p.cu_seqlens_q = p.cu_seqlens_k = starts, p.total_q = 100, p.total_k = 0;
  want(&b.dq, 6, p.q), want(&b.dk, 7, p.k), want(&b.dv, 8, p.v);
  for (const char* kernel : {"wmma", "sm90", "scalar"})
    CHECK_FOR(std::isfinite(dlattn::plan(b, gpus().back(), force(kernel)).predicted_ns), kernel);
}

void the_name_of_a_plan_may_be_asked_for() {
  BackwardParams b = backward_problem();
  want(&b.dq, 6, b.forward.q), want(&b.dk, 7, b.forward.k);
  const std::string text = describe(plan_by_scalar(b));
  CHECK_FOR(text.find("before: delta by row_blocks, ") != std::string::npos, text);
  CHECK_FOR(text.find("operation: backward\nkernel: scalar\n") != std::string::npos, text);
  CHECK_FOR(text.find("after: backward by scalar:queries, ") != std::string::npos, text);
}

// Zeros are written where there is nothing to compute them from.
void empty_problems_have_launches() {
  for (const bool queries : {true, false}) {
    BackwardParams b = backward_problem();
    (queries ? b.forward.seqlen_k : b.forward.seqlen_q) = 0;
    want(&b.dq, 6, b.forward.q), want(&b.dk, 7, b.forward.k), want(&b.dv, 8, b.forward.v);
    const Plan plan = plan_by_scalar(b);
    CHECK(plan.num_launches() == 3);
    for (int i = 0; i < plan.num_launches(); ++i) CHECK(plan.launch(i).grid > 0);
  }
}

// The rows of varlen sequences lie apart, and all within the workspace.
void padded_rows_hold_every_sequence() {
  BackwardParams b = backward_problem();
  AttentionParams& p = b.forward;
  const std::int32_t starts[] = {5, 5, 260, 261, 389, 900};
  p.cu_seqlens_q = starts, p.batch_size = 5, p.total_q = 1000;
  std::int64_t end = 0;
  for (int i = 0; i < 5; ++i) {
    const std::int64_t begin = first_padded_row(starts[i], i);
    CHECK(begin >= end && begin % kDeltaRows == 0);
    const int rows = starts[i + 1] - starts[i];
    end = begin + (rows + kDeltaRows - 1) / kDeltaRows * kDeltaRows;
  }
  CHECK(end <= padded_rows(p));
  const BackwardWorkspace map = backward_workspace(b, 0);
  CHECK(map.own == 2 * 4 * p.num_heads * padded_rows(p));
}

// On Hopper sm90 has deterministic sums too, in memory that grows with the lengths alone; wmma
// those of problems that sm90 does not serve.
void deterministic_on_hopper() {
  const DeviceInfo h200 = test::gpu("NVIDIA H200", 9, 0, 132, 232448);
  for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
    BackwardParams b = backward_problem();
    b.forward.causal = causal;
    want(&b.dq, 6, b.forward.q), want(&b.dk, 7, b.forward.k), want(&b.dv, 8, b.forward.v);
    const Plan fast = plan(b, h200);
    CHECK(fast.kernel == "sm90" && std::string(fast.variant_name) == "plain");
    b.deterministic = true;
    const Plan one = plan(b, h200);
    CHECK(one.kernel == "sm90" && std::string(one.variant_name) == "deterministic");
    CHECK_EQ(one.grid, fast.grid);
    CHECK(one.predicted_ns > fast.predicted_ns && one.predicted_ns < 1.5 * fast.predicted_ns);
    // A counter of 4 bytes for 64 queries, and the tickets, behind a sum that is zero at first. The
    // fast one has counters alone that are.
    const std::int64_t counters = 2 * 8 * 2048 / 64 * 4;
    CHECK_EQ(fast.cleared_bytes, counters);
    CHECK_EQ(one.workspace_bytes, fast.workspace_bytes + 128);
    CHECK_EQ(one.cleared_bytes,
             std::int64_t{2} * 8 * 2048 * fast.head_dim_tile * 4 + counters + 128);
    b.forward.softcap = 5.0;
    CHECK(std::string(plan(b, h200, force("sm90")).variant_name) == "deterministic_softcap");
    want_slopes_and_sinks(&b, true, false);
    b.dalibi_slopes.data = nullptr;
    const Plan mod = plan(b, h200);
    CHECK(mod.kernel == "sm90" && std::string(mod.variant_name) == "score_mod_softcap");
    CHECK_EQ(mod.workspace_bytes, one.workspace_bytes);
    b.dq.data = nullptr, b.forward.alibi_slopes.data = nullptr, b.forward.softcap = 0.0;
    // dk and dv always are.
    CHECK(std::string(plan(b, h200, force("sm90")).variant_name) == "plain");
  }
}

// Plain problems of wide heads have pairs of blocks, the other launches none.
void pairs_of_wide_heads() {
  const DeviceInfo h200 = test::gpu("NVIDIA H200", 9, 0, 132, 232448);
  for (const std::int64_t head_dim : {128, 136, 256}) {
    BackwardParams b = backward_problem();
    AttentionParams& p = b.forward;
    p.head_dim = p.head_dim_v = head_dim;
    const auto widen = [&](auto* view) {
      view->head_stride = head_dim, view->row_stride = 8 * head_dim;
      view->batch_stride = 2048 * 8 * head_dim;
    };
    widen(&p.q), widen(&p.k), widen(&p.v), widen(&p.out), widen(&b.dout);
    want(&b.dq, 6, p.q), want(&b.dk, 7, p.k), want(&b.dv, 8, p.v);
    const bool wide = head_dim > 128;
    const Plan plain = plan(b, h200, force("sm90"));
    CHECK(std::string(plain.variant_name) == (wide ? "pair" : "plain"));
    CHECK_EQ(plain.cluster_size, wide ? 2 : 1);
    CHECK_EQ(plain.block_n, 128);
    CHECK_EQ(plain.grid, plain.cluster_size * 2048 / 128 * 8 * 2);
    CHECK_EQ(plain.launch(2).cluster_size, 1);
    p.softcap = 5.0;
    const Plan capped = plan(b, h200, force("sm90"));
    CHECK(std::string(capped.variant_name) == "softcap" && capped.cluster_size == 1);
    p.softcap = 0.0, b.deterministic = true;
    const Plan in_turns = plan(b, h200, force("sm90"));
    CHECK(std::string(in_turns.variant_name) == "deterministic" && in_turns.cluster_size == 1);
  }
}

// Kernels on tensor cores multiply products by softmax_scale / softcap, which fp32 must hold.
void softcap_beyond_fp32() {
  const DeviceInfo h200 = test::gpu("NVIDIA H200", 9, 0, 132, 232448);
  BackwardParams b = backward_problem();
  AttentionParams& p = b.forward;
  want(&b.dq, 6, p.q), want(&b.dk, 7, p.k), want(&b.dv, 8, p.v);
  const struct {
    double scale, softcap;
  } beyond[] = {{1e10, 1e-29}, {1e-30, 1e30}};
  for (const auto& x : beyond) {
    p.softmax_scale = x.scale, p.softcap = x.softcap;
    CHECK(plan(b, h200, Options()).kernel == "scalar");
    for (const std::string kernel : {"wmma", "sm90"}) {
      std::string text;
      try {
        plan(b, h200, force(kernel));
      } catch (const UnsupportedError& error) {
        text = error.what();
      }
      CHECK_FOR(text.find(kernel + ": softmax_scale / softcap is ") != std::string::npos, text);
    }
  }
  p.softmax_scale = 1e-10, p.softcap = 1e20;
  CHECK(plan(b, h200, Options()).kernel != "scalar");
}

// Long walks have consumers that compute dQ a step late: from 96 tiles of queries in the mean on.
void late_consumers_of_long_walks() {
  const DeviceInfo h200 = test::gpu("NVIDIA H200", 9, 0, 132, 232448);
  for (const std::int64_t head_dim : {64, 128}) {
    BackwardParams b = backward_problem();
    AttentionParams& p = b.forward;
    p.head_dim = p.head_dim_v = head_dim;
    p.causal = Causal::kNone;
    want(&b.dq, 6, p.q), want(&b.dk, 7, p.k), want(&b.dv, 8, p.v);
    const auto name = [&](std::int64_t tiles) {
      p.seqlen_q = p.seqlen_k = tiles * (head_dim == 64 ? 128 : 64);
      const auto lengthen = [&](auto* view) {
        view->head_stride = head_dim, view->row_stride = 8 * head_dim;
        view->batch_stride = p.seqlen_q * 8 * head_dim;
      };
      lengthen(&p.q), lengthen(&p.k), lengthen(&p.v), lengthen(&p.out), lengthen(&b.dout);
      lengthen(&b.dq), lengthen(&b.dk), lengthen(&b.dv);
      return std::string(plan(b, h200, force("sm90")).variant_name);
    };
    CHECK(name(95) == "plain" && name(96) == "late");
    p.window_left = 128;
    CHECK(name(96) == "plain");
    p.window_left = -1, p.softcap = 5.0;
    CHECK(name(96) == "softcap");
    p.softcap = 0.0, b.deterministic = true;
    CHECK(name(96) == "deterministic");
    b.deterministic = false, p.causal = Causal::kBottomRight;
    CHECK(name(191) == "plain" && name(192) == "late");
  }
}

// Registers do not suffice for both with head_dim 128.
void score_mod_with_softcap_by_head_dim() {
  const DeviceInfo h200 = test::gpu("NVIDIA H200", 9, 0, 132, 232448);
  for (const std::int64_t head_dim : {64, 72, 128, 136, 256}) {
    BackwardParams b = backward_problem();
    AttentionParams& p = b.forward;
    p.head_dim = p.head_dim_v = head_dim;
    const auto widen = [&](auto* view) {
      view->head_stride = head_dim, view->row_stride = 8 * head_dim;
      view->batch_stride = 2048 * 8 * head_dim;
    };
    widen(&p.q), widen(&p.k), widen(&p.v), widen(&p.out), widen(&b.dout);
    want(&b.dq, 6, p.q), want(&b.dk, 7, p.k), want(&b.dv, 8, p.v);
    want_slopes_and_sinks(&b, true, false);
    CHECK(std::string(plan(b, h200, force("sm90")).variant_name) == "score_mod");
    p.softcap = 5.0;
    std::string text;
    try {
      text = plan(b, h200, force("sm90")).variant_name;
    } catch (const Error& error) {
      text = error.what();
    }
    const bool fits = head_dim <= 64 || head_dim > 128;
    const char* const expected =
        fits ? "score_mod_softcap" : "has no alibi_slopes with softcap and a head_dim of 65 to 128";
    CHECK_FOR(text.find(expected) != std::string::npos, text);
  }
}

// On Hopper sm90 modifies scores too, but for what others compute of them or have beside.
void score_mod_on_hopper() {
  using Names = std::vector<std::string>;
  const DeviceInfo h200 = test::gpu("NVIDIA H200", 9, 0, 132, 232448);
  BackwardParams b = backward_problem();
  AttentionParams& p = b.forward;
  want(&b.dq, 6, p.q), want(&b.dk, 7, p.k), want(&b.dv, 8, p.v);
  p.bias.data = at(11), p.bias.dtype = DType::kFloat16, p.bias.row_stride = 2048;
  const auto check = [&](const char* kernel, int smem_bytes) {
    const Plan chosen = plan(b, h200);
    CHECK_FOR(chosen.kernel == kernel, describe(chosen));
    if (smem_bytes) CHECK_EQ(chosen.smem_bytes, smem_bytes);
  };
  const auto refused = [&](const std::string& reason) {
    check("wmma", 0);
    std::string text;
    try {
      plan(b, h200, force("sm90"));
    } catch (const Error& error) {
      text = error.what();
    }
    CHECK_FOR(text.find("has no " + reason) != std::string::npos, text);
  };
  check("sm90", 198912);
  CHECK(std::string(plan(b, h200).variant_name) == "score_mod");
  p.mask.data = reinterpret_cast<const std::uint8_t*>(at(12));
  check("sm90", 198912 + 128 * 128);
  b.deterministic = true, check("sm90", 198912 + 128 * 128);
  b.deterministic = false, p.bias.dtype = DType::kFloat32, refused("bias of float32");
  // With softcap a step has half of the queries, and dbias a launch of its own.
  p.bias.dtype = DType::kFloat16, p.softcap = 5.0;
  CHECK(std::string(plan(b, h200).variant_name) == "score_mod_softcap");
  p.softcap = 0.0;
  p.bias.dtype = DType::kFloat16, b.dbias.data = at(13), b.dbias.dtype = DType::kFloat16;
  const auto dbias = [&](std::int64_t batch, std::int64_t head, std::int64_t row) {
    b.dbias.batch_stride = batch, b.dbias.head_stride = head, b.dbias.row_stride = row;
  };
  dbias(8 << 22, 1 << 22, 2048);
  check("sm90", 198912 + 128 * 128);
  const std::int64_t grid = plan(b, h200).grid;
  dbias(0, 1 << 22, 2048);
  check("sm90", 198912 + 128 * 128);
  CHECK_EQ(plan(b, h200).grid, grid / 2);  // a block walks both entries of the batch
  CHECK((launches_of(plan(b, h200)) == Names{"delta", "score_mod", "convert"}));
  p.softcap = 5.0;
  CHECK((launches_of(plan(b, h200)) == Names{"delta", "score_mod_softcap", "convert", "bias"}));
  p.softcap = 0.0;
  // Other sums, and rows of no multiple of 16 bytes, by products of their own.
  const std::int64_t others[][3] = {
      {1 << 22, 0, 2048}, {8 * 2048, 2048, 0}, {8 * 2052 * 2048, 2052 * 2048, 2052}};
  for (const auto& strides : others) {
    dbias(strides[0], strides[1], strides[2]);
    const Plan other = plan(b, h200);
    CHECK_FOR(other.kernel == "sm90", describe(other));
    CHECK((launches_of(other) == Names{"delta", "score_mod", "convert", "bias"}));
    CHECK(other.after[1].kernel == "wmma" && other.grid == grid);
  }
  b.dbias.data = nullptr, p.bias.data = nullptr;
  want_slopes_and_sinks(&b, true, false);
  check("sm90", 198912 + 128 * 128);
  const Plan slopes = plan(b, h200);
  CHECK((launches_of(slopes) == Names{"delta", "score_mod", "convert", "reduce"}));
  CHECK_EQ(slopes.parts_per_head, 2048 / 128 * 8);  // warps of blocks of keys
  b.dalibi_slopes.data = nullptr;
  check("sm90", 198912 + 128 * 128);
  // The sum of dQ lies behind the parts, and both are cleared.
  const Plan none = plan(b, h200);
  const std::int64_t parts = slopes.workspace_bytes - none.workspace_bytes;
  CHECK_EQ(parts, 2 * 8 * slopes.parts_per_head * 4);
  CHECK_EQ(slopes.cleared_bytes - none.cleared_bytes, parts);
  CHECK(slopes.predicted_ns > none.predicted_ns);
}

}  // namespace

int main() {
  score_mod_on_hopper();
  pairs_of_wide_heads();
  softcap_beyond_fp32();
  late_consumers_of_long_walks();
  score_mod_with_softcap_by_head_dim();
  deterministic_on_hopper();
  what_is_wanted_is_launched();
  causal_grids_of_one_wave();
  short_problems_go_to_tensor_cores();
  unaligned_scores_go_to_wmma();
  predicted_times_are_those_measured();
  wmma_by_shared_memory();
  packs_without_keys_have_a_time();
  the_name_of_a_plan_may_be_asked_for();
  empty_problems_have_launches();
  padded_rows_hold_every_sequence();
  return test::summary();
}
