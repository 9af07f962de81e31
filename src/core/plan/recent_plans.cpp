#include "core/plan/recent_plans.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace dlattn::core {
namespace {

// A field that is neither in the table nor among the words of PlanKey's constructor is missed here:
// all are of a word, with what pads them, but for the device's two numbers, which share one.
constexpr int kWordsOfOptions = 5;
static_assert(sizeof(AttentionParams) ==
              sizeof(std::int64_t) * (num_plan_words() - kWordsOfOptions - 1));

// Stands for a call's addresses, asked for in the order of the table, as far as a plan may see
// them: which are null, which are the same, and how they are aligned, up to a workspace's
// alignment, the most that is asked of any.
class SeenAddresses {
 public:
  std::uintptr_t operator()(std::uintptr_t address) {
    constexpr std::uintptr_t kMost = kWorkspaceAlignment;
    if (!address) return 0;
    std::size_t i = 0;
    while (i < count_ && addresses_[i] != address) ++i;
    if (i == count_) addresses_[count_++] = address;
    return (i + 1) * kMost + address % kMost;
  }

 private:
  std::uintptr_t addresses_[num_tensors(kForwardOperands)];  // the first count_ are set
  std::size_t count_ = 0;
};

std::int64_t bits_of(double number) {
  std::int64_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

struct Kept {
  PlanKey key;
  Plan plan;
};
// More than a step of a model has problems. Nothing to destroy: a thread that ends does nothing.
struct RecentPlans {
  static constexpr int kMost = 4;
  Kept plans[kMost];
  int next = 0;
};
static_assert(std::is_trivially_destructible_v<RecentPlans>);
thread_local RecentPlans recent;

}  // namespace

PlanKey::PlanKey(const AttentionParams& p, const Options& options) {
  std::int64_t* word = words_;
  const auto add = [&word](auto value) { *word++ = static_cast<std::int64_t>(value); };
  SeenAddresses seen;
  for (const Operand& operand : kForwardOperands) {
    if (!operand.is_tensor()) {
      add(load<std::int64_t>(&p, operand.offset));
      continue;
    }
    const char* const field = field_of(operand, &p);
    add(seen(load<std::uintptr_t>(field, 0)));
    if (operand.kind == Kind::kList) continue;
    add(load<DType>(field, offsetof(TensorView, dtype)));
    for (int i = 0; i < 4; ++i) add(load<std::int64_t>(field, stride_offset(i)));
  }
  add(p.device.type), add(p.device.index);
  add(bits_of(p.softmax_scale)), add(bits_of(p.softcap));
  add(p.causal), add(p.window_left), add(p.window_right);
  add(p.heads_per_q_descale), add(p.precision);
  add(options.batch_invariant), add(options.num_splits), add(options.split_size);
  add(options.allow_workspace), add(options.workspace.function != nullptr);
}

bool PlanKey::operator==(const PlanKey& other) const {
  return std::equal(words_, words_ + kWords, other.words_);
}

AttentionParams problem_of_key(const AttentionParams& params) {
  AttentionParams problem = params;
  SeenAddresses seen;
  const Operands table = operands_of(params);
  for (const Operand* tensor = table.tensors; tensor < table.end; ++tensor)
    store(&problem, tensor->offset, seen(load<std::uintptr_t>(&params, tensor->offset)));
  return problem;
}

const Plan* recent_plan(const PlanKey& key) {
  for (const Kept& kept : recent.plans) {
    if (kept.key == key) return &kept.plan;
  }
  return nullptr;
}

void keep_plan(const PlanKey& key, const Plan& plan) {
  recent.plans[recent.next] = {key, plan};
  recent.next = (recent.next + 1) % RecentPlans::kMost;
}

}  // namespace dlattn::core
