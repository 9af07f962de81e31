#include "dlattn/append.h"

#include "core/append.h"
#include "core/backend.h"
#include "core/plan.h"
#include "core/validate.h"

namespace dlattn {

Plan plan(const AppendParams& params, const DeviceInfo& device) {
  core::validate(params);
  return core::make_plan(params, device);
}

void append_kv(const AppendParams& params, void* stream, Poll poll) {
  core::validate(params);
  if (num_new_rows(params) == 0) return;
  const Plan plan = core::make_plan(params, device_info(params.device));
  core::print_if_asked(plan);
  if (plan.kernel == core::kCpu) return cpu::append_kv(params, plan.num_threads, poll);
  cuda::find_launcher<AppendParams>(plan.kernel, plan.dtype, plan.head_dim_tile)(params, plan,
                                                                                 stream);
}

}  // namespace dlattn
