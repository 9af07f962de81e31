#include "dlattn/merge.h"

#include "core/backend.h"
#include "core/operations/merge.h"
#include "core/plan/choose.h"

namespace dlattn {

template Plan core::make_plan(const MergeParams&, const DeviceInfo&);

Plan plan(const MergeParams& params, const DeviceInfo& device) {
  core::validate(params);
  return core::make_plan(params, device);
}

void merge_states(const MergeParams& params, void* stream, Poll poll) {
  core::validate(params);
  if (params.batch_size * params.seqlen_q == 0) return;
  const Plan plan = core::make_plan(params, device_info(params.device));
  core::print_if_asked(plan);
  if (plan.kernel == core::kCpu) return cpu::merge_states(params, poll);
  cuda::enqueue(params, plan, stream);
}

}  // namespace dlattn
