// The plans that a thread keeps of its latest calls: a call's is the one that would be made for it.
#include "core/plan/recent_plans.h"

#include <cstddef>
#include <cstring>
#include <string>
#include <thread>

#include "check.h"
#include "core/calls/forward.h"
#include "core/plan/plan.h"
#include "plan_problems.h"
#include "random_problem.h"

using namespace dlattn;
using core::keep_plan;
using core::PlanKey;
using core::problem_of_key;
using core::recent_plan;
using test::gpus;
using test::memory;

namespace {

void* no_memory(void*, std::int64_t) {
  return nullptr;
}

std::string text_of(const AttentionParams& p, const DeviceInfo& device, const Options& options) {
  Plan plan;
  if (!core::find_plan(p, device, options, &plan)) return "none";
  return describe(plan) + std::to_string(plan.all_heads_together) +
         std::to_string(plan.cleared_bytes);
}

// Where the addresses of a problem's tensors stand in it.
bool is_address(std::size_t byte) {
  for (const core::Operand& operand : core::kForwardOperands) {
    if (operand.is_tensor() && byte >= operand.offset && byte < operand.offset + sizeof(void*))
      return true;
  }
  return false;
}

// The bytes that pad a word, which no field has.
bool is_padding(std::size_t byte) {
  const auto behind = [byte](std::size_t field, std::size_t bytes) {
    return byte >= field + bytes && byte < field + sizeof(std::int64_t);
  };
  for (const core::Operand& operand : core::kForwardOperands) {
    if (operand.kind == core::Kind::kTensor &&
        behind(operand.offset + offsetof(TensorView, dtype), sizeof(DType)))
      return true;
  }
  const std::size_t in_device = byte - offsetof(AttentionParams, device);
  return (in_device >= sizeof(DeviceType) && in_device < offsetof(Device, index)) ||
         behind(offsetof(AttentionParams, causal), sizeof(Causal)) ||
         behind(offsetof(AttentionParams, precision), sizeof(Precision));
}

void test_every_byte_of_the_parameters_counts() {
  const AttentionParams p = test::problem(DType::kFloat16, 64);
  const PlanKey key(p, {});
  CHECK(key == PlanKey(p, {}) && !(key == PlanKey()));
  for (std::size_t byte = 0; byte < sizeof p; ++byte) {
    AttentionParams other = p;
    auto* const bytes = reinterpret_cast<unsigned char*>(&other);
    bytes[byte] ^= 0x40;
    const bool counts = !is_padding(byte) && !is_address(byte);
    if (!is_address(byte)) CHECK_FOR((PlanKey(other, {}) == key) == !counts, std::to_string(byte));
  }
}

void test_every_option_counts() {
  const AttentionParams p = test::problem(DType::kFloat16, 64);
  Options changed[6];
  changed[1].batch_invariant = true;
  changed[2].num_splits = 2;
  changed[3].split_size = 128;
  changed[4].allow_workspace = false;
  changed[5].workspace.function = no_memory;
  for (const Options& a : changed) {
    for (const Options& b : changed) CHECK((PlanKey(p, a) == PlanKey(p, b)) == (&a == &b));
  }
  Options named;
  CHECK(core::is_plan_kept(p, named));
  named.kernel = "wmma";
  CHECK(!core::is_plan_kept(p, named));
  named.kernel = core::kAuto, named.variant = "packed";
  CHECK(!core::is_plan_kept(p, named));
  AttentionParams on_cpu = p;
  on_cpu.device = {};
  CHECK(!core::is_plan_kept(on_cpu, {}));
}

// An address counts by its alignment, and by whether another tensor has the same.
void test_addresses() {
  const AttentionParams p = test::problem(DType::kFloat16, 64);
  const PlanKey key(p, {});
  AttentionParams moved = p;
  moved.q.data = memory + 7 * test::kApart, moved.out.data = memory + 4096;
  CHECK(PlanKey(moved, {}) == key);
  for (const int bytes : {2, 4, 8, 16, 32, 64, 128}) {
    moved.q.data = memory + bytes;
    CHECK_FOR(!(PlanKey(moved, {}) == key), std::to_string(bytes));
  }
  AttentionParams shared = p;
  shared.v.data = shared.k.data;
  CHECK(!(PlanKey(shared, {}) == key));
  for (const core::Operand& operand : core::kForwardOperands) {
    if (!operand.is_tensor()) continue;
    AttentionParams given = p;
    const bool was_given = core::load<void*>(&p, operand.offset);
    core::store<const void*>(&given, operand.offset, was_given ? nullptr : memory + 4096);
    CHECK_FOR(!(PlanKey(given, {}) == key), operand.name);
  }
}

// Plans are made of what the key has: with the real addresses they are the same.
void test_plans_see_no_more_than_the_key() {
  test::Random random(20261128);
  int found = 0;
  for (int i = 0; i < 4000; ++i) {
    test::Features features = test::random_features(random);
    features.options.batch_invariant = random.chance(20);
    features.options.kernel = core::kAuto, features.options.variant = nullptr;
    const bool varlen = !features.cache && random.chance(30);
    AttentionParams p = test::random_problem(random, features, varlen);
    if (random.chance(10)) p.v.data = p.k.data;
    const std::string real = text_of(p, features.device, features.options);
    found += real != "none";
    CHECK_FOR(text_of(problem_of_key(p), features.device, features.options) == real, real);
  }
  CHECK(found > 2000);
  for (const DeviceInfo& device : gpus()) {
    const AttentionParams p = test::latents(4, 1024, 16);
    AttentionParams apart = p;
    apart.v.data = memory + 2 * test::kApart;
    const std::string real = text_of(p, device, {});
    CHECK(text_of(problem_of_key(p), device, {}) == real);
    CHECK(text_of(problem_of_key(apart), device, {}) == text_of(apart, device, {}));
  }
}

void test_the_latest_plans_are_kept() {
  const auto key_of = [](std::int64_t seqlen) {
    AttentionParams p = test::problem(DType::kFloat16, 64);
    p.seqlen_q = seqlen;
    return PlanKey(p, {});
  };
  CHECK(!recent_plan(key_of(0)) && !recent_plan(PlanKey(AttentionParams(), {})));
  constexpr int kKept = 4;
  for (int n = 1; n <= kKept + 1; ++n) {
    Plan plan;
    plan.grid = n;
    keep_plan(key_of(n), plan);
  }
  CHECK(!recent_plan(key_of(1)));
  for (int n = 2; n <= kKept + 1; ++n)
    CHECK(recent_plan(key_of(n)) && recent_plan(key_of(n))->grid == n);
  std::thread([&] { CHECK(!recent_plan(key_of(kKept + 1))); }).join();
  std::thread([&] { CHECK(!recent_plan(key_of(kKept))); }).join();
  CHECK(recent_plan(key_of(kKept)));
}

// A call of which a plan is kept needs no device to be planned. What depends on its addresses is
// checked all the same.
void test_calls_take_the_plan_that_is_kept() {
  const DeviceInfo device = gpus()[3];
  AttentionParams p = test::problem(DType::kFloat16, 128);
  const Plan plan = dlattn::plan(p, device, {});
  keep_plan(PlanKey(p, {}), plan);
  p.q.data = memory + 6 * test::kApart;
  const core::PreparedForward prepared = core::prepare_forward(p, {});
  CHECK(describe(prepared.plan) == describe(plan));
  CHECK(prepared.params.q.data == p.q.data);
  p.out.data = const_cast<void*>(p.q.data);
  CHECK_THROWS(core::prepare_forward(p, {}), UnsupportedError,
               "out shares memory with q; accepted: memory of its own, or a slice of the same "
               "buffer whose strides show that it has no element in common");
  p.out.data = memory + 3 * test::kApart;
  p.seqlen_q = -1;
  CHECK_THROWS(core::prepare_forward(p, {}), UnsupportedError,
               "seqlen_q is -1; accepted: at least 0");
}

}  // namespace

int main() {
  test_every_byte_of_the_parameters_counts();
  test_every_option_counts();
  test_addresses();
  test_plans_see_no_more_than_the_key();
  test_the_latest_plans_are_kept();
  test_calls_take_the_plan_that_is_kept();
  return test::summary();
}
