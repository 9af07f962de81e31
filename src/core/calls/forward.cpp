#include "dlattn/forward.h"

#include "core/backend.h"
#include "core/calls/forward.h"
#include "core/calls/support.h"
#include "core/plan/plan.h"
#include "core/plan/recent_plans.h"
#include "core/problem/quantized.h"
#include "core/validate/validate.h"

namespace dlattn {
namespace {

// The plan of a call. Where nobody gives a workspace it is the fastest that needs none, if there is
// one.
Plan plan_of_call(const AttentionParams& params, const DeviceInfo& device, const Options& options) {
  const bool given = params.workspace || options.workspace.function;
  // Other precisions need one in any case.
  if (given || device.type == DeviceType::kCpu || params.precision != Precision::kInputs)
    return core::make_plan(params, device, options);
  Options without = options;
  without.allow_workspace = false;
  Plan plan, other;
  if (!options.batch_invariant)
    return core::find_plan(params, device, without, &plan)
               ? plan
               : core::make_plan(params, device, options);
  // The choice for problems of any lengths, with a workspace or not, comes first.
  plan = core::make_plan(params, device, options);
  return plan.workspace_bytes > 0 && core::find_plan(params, device, without, &other) ? other
                                                                                      : plan;
}

}  // namespace

Support supported(const AttentionParams& params, const DeviceInfo& device, const Options& options) {
  return core::support_of(params, params, device, options, [&] {
    core::validate(params);
    core::validate(options);
  });
}

Plan plan(const AttentionParams& params, const DeviceInfo& device, const Options& options) {
  core::validate(params);
  core::validate(options);
  return core::make_plan(params, device, options);
}

namespace core {

namespace {

// The plan of a valid call whose plan is kept.
Plan plan_to_keep(const AttentionParams& params, const DeviceInfo& device, const Options& options) {
  try {
    return plan_of_call(problem_of_key(params), device, options);
  } catch (const UnsupportedError&) {
    return plan_of_call(params, device, options);  // whose reasons name the real addresses
  }
}

// Checks a call and makes its plan.
Plan plan_of_checked_call(const AttentionParams& params, const Options& options) {
  if (!is_plan_kept(params, options)) {
    validate(params);
    validate(options);
    return plan_of_call(params, device_info(params.device), options);
  }
  const PlanKey key(params, options);
  if (const Plan* const plan = recent_plan(key)) {
    check_call_memory(params);  // all else was checked for that plan
    return *plan;
  }
  validate(params);
  validate(options);
  const Plan plan = plan_to_keep(params, device_info(params.device), options);
  keep_plan(key, plan);
  return plan;
}

}  // namespace

PreparedForward prepare_forward(const AttentionParams& params, const Options& options) {
  PreparedForward prepared{params, plan_of_checked_call(params, options), options.poll};
  print_if_asked(prepared.plan);
  if (prepared.plan.kernel == kCpu || prepared.plan.num_launches() == 0) return prepared;
  if (prepared.plan.workspace_bytes > 0)
    prepared.params.workspace = workspace_of(params, prepared.plan, options.workspace);
  return prepared;
}

void PreparedForward::run(void* stream) {
  if (plan.kernel == kCpu) return cpu::forward(params, plan, poll);
  if (plan.num_launches() == 0) return;
  QuantizeTask task;
  if (params.precision != Precision::kInputs) {
    task = task_of(params, params.workspace);
    if (!params.quantized_kv) params.quantized_kv = task.quantized_kv;
  }
  for (int i = 0; i < plan.num_launches(); ++i) {
    const Launch& launch = plan.launch(i);
    switch (launch.operation) {
      case Operation::kQuantize:
        task.queries = launch.variant != 0;
        cuda::enqueue(task, plan, launch, stream);
        break;
      case Operation::kCombine:
        cuda::enqueue(CombineTask{params}, plan, launch, stream);
        break;
      default:
        cuda::enqueue(params, plan, launch, stream);
    }
  }
}

}  // namespace core

void forward(const AttentionParams& params, void* stream, const Options& options) {
  core::prepare_forward(params, options).run(stream);
}

}  // namespace dlattn
