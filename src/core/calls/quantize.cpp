#include "dlattn/quantize.h"

#include "core/backend.h"
#include "core/plan/choose.h"
#include "core/problem/quantized.h"
#include "core/validate/validate.h"

namespace dlattn {

template Plan core::make_plan(const QuantizeTask&, const DeviceInfo&);

std::int64_t quantized_kv_bytes(const QuantizeParams& params) {
  core::validate_sizes(params);
  return quantized_layout(params).bytes;
}

namespace {

QuantizeTask task_of_keys(const QuantizeParams& params) {
  QuantizeTask task;
  static_cast<QuantizeParams&>(task) = params;
  return task;
}

}  // namespace

Plan plan(const QuantizeParams& params, const DeviceInfo& device) {
  core::validate(params);
  return core::make_plan(task_of_keys(params), device);
}

void quantize_kv(const QuantizeParams& params, void* stream) {
  core::validate(params);
  const QuantizeTask task = task_of_keys(params);
  const Plan plan = core::make_plan(task, device_info(params.device));
  core::print_if_asked(plan);
  if (plan.kernel == core::kCpu) return cpu::quantize_kv(params, plan.num_threads);
  cuda::enqueue(task, plan, stream);
}

}  // namespace dlattn
