#include "dlattn/forward.h"

#include "core/backend.h"
#include "core/plan.h"
#include "core/validate.h"

namespace dlattn {

Support supported(const AttentionParams& params, const DeviceInfo& device, const Options& options) {
  try {
    core::validate(params);
  } catch (const UnsupportedError& error) {
    return {false, {error.what()}};
  }
  std::vector<std::string> reasons = core::refusals(params, device, options);
  return {reasons.empty(), std::move(reasons)};
}

Plan plan(const AttentionParams& params, const DeviceInfo& device, const Options& options) {
  core::validate(params);
  return core::make_plan(params, device, options);
}

void forward(const AttentionParams& params, void* stream, const Options& options) {
  core::validate(params);
  const DeviceInfo& device = device_info(params.device);
  const Plan plan = core::make_plan(params, device, options);
  core::print_if_asked(plan);
  if (plan.kernel == core::kCpu) return cpu::forward(params, plan, options.poll);
  if (plan.grid == 0) return;
  const auto launch =
      cuda::find_launcher<AttentionParams>(plan.kernel, plan.dtype, plan.head_dim_tile);
  if (plan.workspace_bytes == 0) return launch(params, plan, stream);
  AttentionParams with_workspace = params;
  with_workspace.workspace = core::workspace_of(params, plan, options.workspace);
  launch(with_workspace, plan, stream);
}

}  // namespace dlattn
