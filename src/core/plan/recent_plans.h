#pragma once

#include <cstdint>

#include "core/operations/forward.h"
#include "core/plan/plan.h"
#include "dlattn/forward.h"

// The plans of a thread's latest calls on a GPU. To plan a problem, which compares all families and
// their variants, takes longer than to enqueue its kernel, and a model asks for the same few
// problems again and again.
namespace dlattn::core {

// The words of the table's fields, and of those that it does not have.
constexpr int num_plan_words() {
  constexpr int kOthers = 14, kOfTensor = 6;
  int count = kOthers;
  for (const Operand& operand : kForwardOperands)
    count += operand.kind == Kind::kTensor ? kOfTensor : 1;
  return count;
}

// All that the checks and the plan of a call may depend on, in words, but for whether tensors share
// memory. Of their addresses it has which are null, which are the same, and how they are aligned.
class PlanKey {
 public:
  constexpr PlanKey() = default;  // no call's
  PlanKey(const AttentionParams& params, const Options& options);

  bool operator==(const PlanKey& other) const;

 private:
  static constexpr int kWords = num_plan_words();

  std::int64_t words_[kWords] = {};
};

// Whether the plan of a call is kept: one on a GPU that names no kernel.
inline bool is_plan_kept(const AttentionParams& params, const Options& options) {
  return params.device.type == DeviceType::kCuda && options.kernel == kAuto && !options.variant;
}

// The parameters with other addresses, of which a plan sees no more than a PlanKey does.
AttentionParams problem_of_key(const AttentionParams& params);

// The calling thread's plan of that key; null: it has none, or no longer. Good until it keeps
// another one.
const Plan* recent_plan(const PlanKey& key);
// Keeps a plan instead of the one that was kept first.
void keep_plan(const PlanKey& key, const Plan& plan);

}  // namespace dlattn::core
