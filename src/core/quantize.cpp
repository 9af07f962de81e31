#include "dlattn/quantize.h"

#include "core/backend.h"
#include "core/plan.h"
#include "core/quantized.h"
#include "core/validate.h"

namespace dlattn {

std::int64_t quantized_kv_bytes(const QuantizeParams& params) {
  core::validate_sizes(params);
  return quantized_layout(params).bytes;
}

Plan plan(const QuantizeParams& params, const DeviceInfo& device) {
  core::validate(params);
  return core::make_plan(params, device);
}

void quantize_kv(const QuantizeParams& params, void* stream) {
  core::validate(params);
  const Plan plan = core::make_plan(params, device_info(params.device));
  core::print_if_asked(plan);
  if (plan.kernel == core::kCpu) return cpu::quantize_kv(params, plan.num_threads);
  if (plan.grid == 0) return;
  cuda::find_launcher<QuantizeParams>(plan.kernel, plan.dtype, plan.head_dim_tile)(params, plan,
                                                                                   stream);
}

}  // namespace dlattn
