#include "dlattn/backward.h"

#include "core/backend.h"
#include "core/operations/backward.h"
#include "core/plan/plan.h"
#include "core/validate/call_memory.h"
#include "core/validate/fail.h"
#include "core/validate/validate.h"

namespace dlattn {
namespace {

void validate(const BackwardParams& params, const Options& options) {
  core::validate(params);
  core::validate(options);
  if (options.num_splits > 0)
    core::fail("num_splits is ", options.num_splits, "; accepted: 0 in a backward pass");
  if (options.split_size > 0)
    core::fail("split_size is ", options.split_size, "; accepted: 0 in a backward pass");
}

// The parameters with the workspace that the plan needs.
BackwardParams with_workspace(const BackwardParams& params, const Plan& plan,
                              const WorkspaceAllocator& allocator) {
  BackwardParams given = params;
  AttentionParams& p = given.forward;
  const bool allocates = plan.workspace_bytes > 0 && !p.workspace && allocator.function;
  if (allocates) {
    p.workspace = allocator.function(allocator.context, plan.workspace_bytes);
    p.workspace_bytes = plan.workspace_bytes;
  }
  if (const std::string why = core::workspace_refusal(p, plan); !why.empty())
    throw UnsupportedError(why);
  if (allocates) {
    core::check_own_memory(
        core::GivenTensors(core::operands_of(given), &given, core::sizes_of(given)));
  }
  return given;
}

}  // namespace

Support supported(const BackwardParams& params, const DeviceInfo& device, const Options& options) {
  try {
    validate(params, options);
  } catch (const UnsupportedError& error) {
    return {false, {error.what()}};
  }
  Plan plan;
  std::vector<std::string> reasons = core::refusals(params, device, options, &plan);
  if (reasons.empty() && params.forward.workspace && device.type == DeviceType::kCuda) {
    const std::string why = core::workspace_refusal(params.forward, plan);
    if (!why.empty()) reasons.push_back(why);
  }
  return {reasons.empty(), std::move(reasons)};
}

Plan plan(const BackwardParams& params, const DeviceInfo& device, const Options& options) {
  validate(params, options);
  return core::make_plan(params, device, options);
}

void backward(const BackwardParams& params, void* stream, const Options& options) {
  validate(params, options);
  const Plan plan = core::make_plan(params, device_info(params.forward.device), options);
  core::print_if_asked(plan);
  if (plan.kernel == core::kCpu) return cpu::backward(params, plan, options.poll);
  cuda::enqueue(with_workspace(params, plan, options.workspace), plan, stream);
}

}  // namespace dlattn
