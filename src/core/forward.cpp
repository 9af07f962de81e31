#include "dlattn/forward.h"

#include "core/backend.h"
#include "core/forward.h"
#include "core/plan.h"
#include "core/quantized.h"
#include "core/validate.h"

namespace dlattn {
namespace {

// Enqueues the launch of a plan that writes inputs in 8 bits to the workspace.
void quantize(const Launch& launch, void* stream, AttentionParams* params) {
  const QuantizeTask task = task_of(*params, params->workspace);
  if (!params->quantized_kv) params->quantized_kv = task.quantized_kv;
  if (launch.grid == 0) return;  // there is nothing to quantise
  Plan plan;
  static_cast<Launch&>(plan) = launch;
  cuda::find_launcher<QuantizeTask>(plan.kernel, plan.dtype, plan.head_dim_tile)(task, plan,
                                                                                 stream);
}

// The plan of a call. One for a workspace that nobody gives is passed over for the fastest that
// needs none, if there is one.
Plan plan_of_call(const AttentionParams& params, const DeviceInfo& device, const Options& options) {
  const Plan plan = core::make_plan(params, device, options);
  const bool given = params.workspace || options.workspace.function;
  if (plan.kernel == core::kCpu || plan.workspace_bytes == 0 || given) return plan;
  if (params.precision != Precision::kInputs) return plan;  // that needs one in any case
  Options without = options;
  without.allow_workspace = false;
  return core::refusals(params, device, without).empty() ? core::make_plan(params, device, without)
                                                         : plan;
}

}  // namespace

Support supported(const AttentionParams& params, const DeviceInfo& device, const Options& options) {
  try {
    core::validate(params);
    core::validate(options);
  } catch (const UnsupportedError& error) {
    return {false, {error.what()}};
  }
  std::vector<std::string> reasons = core::refusals(params, device, options);
  if (reasons.empty() && params.workspace && device.type == DeviceType::kCuda) {
    const Plan plan = core::make_plan(params, device, options);
    const std::string why = core::workspace_refusal(params, plan);
    if (!why.empty()) reasons.push_back(why);
  }
  return {reasons.empty(), std::move(reasons)};
}

Plan plan(const AttentionParams& params, const DeviceInfo& device, const Options& options) {
  core::validate(params);
  core::validate(options);
  return core::make_plan(params, device, options);
}

namespace core {

PreparedForward prepare_forward(const AttentionParams& params, const Options& options) {
  validate(params);
  validate(options);
  const DeviceInfo& device = device_info(params.device);
  PreparedForward prepared{params, plan_of_call(params, device, options), options.poll};
  print_if_asked(prepared.plan);
  if (prepared.plan.kernel == kCpu || prepared.plan.grid == 0) return prepared;
  if (prepared.plan.workspace_bytes > 0)
    prepared.params.workspace = workspace_of(params, prepared.plan, options.workspace);
  return prepared;
}

void PreparedForward::run(void* stream) {
  if (plan.kernel == kCpu) return cpu::forward(params, plan, poll);
  if (plan.grid == 0) return;
  const auto launch =
      cuda::find_launcher<AttentionParams>(plan.kernel, plan.dtype, plan.head_dim_tile);
  if (plan.num_before > 0) quantize(plan.others[0], stream, &params);
  launch(params, plan, stream);
}

}  // namespace core

void forward(const AttentionParams& params, void* stream, const Options& options) {
  core::prepare_forward(params, options).run(stream);
}

}  // namespace dlattn
