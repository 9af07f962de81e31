#include "dlattn/backward.h"

#include "core/backend.h"
#include "core/calls/support.h"
#include "core/plan/plan.h"
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

}  // namespace

Support supported(const BackwardParams& params, const DeviceInfo& device, const Options& options) {
  return core::support_of(params, params.forward, device, options,
                          [&] { validate(params, options); });
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
  BackwardParams given = params;
  if (plan.workspace_bytes > 0)
    given.forward.workspace = core::workspace_of(params, plan, options.workspace);
  cuda::enqueue(given, plan, stream);
}

}  // namespace dlattn
