#include <algorithm>

#include "core/code.h"
#include "core/family.h"
#include "cuda/quantize/key_blocks/traits.h"

namespace dlattn::quantize::key_blocks {
namespace {

// A guess that nobody has measured: bytes at four fifths of an H200's memory bandwidth, which other
// devices are taken to have per SM, and two launches.
double predicted_ns(const QuantizeParams& p, const QuantizedLayout& layout, int num_sms) {
  constexpr double kBytesPerNs = 0.8 * 4000.0, kSms = 132.0, kLaunches = 5000.0;
  const double rows = static_cast<double>(layout.rows) * static_cast<double>(layout.heads) *
                      (p.cu_seqlens_k ? 1.0 : static_cast<double>(p.batch_size));
  const double bytes = static_cast<double>(2 * (p.head_dim + p.head_dim_v) + 2 * layout.columns);
  return rows * bytes / (kBytesPerNs * std::max(num_sms, 1) / kSms) + kLaunches;
}

bool plan_quantize(const QuantizeParams& p, const DeviceInfo& device, const Options&, Plan* plan,
                   std::string* why) {
  if (!core::has_code(device, kMinCapability, why)) return false;
  const QuantizedLayout layout = quantized_layout(p);
  plan->block_n = layout.block_n;
  plan->num_warps = num_threads(layout.columns, layout.block_n) / 32;
  plan->smem_bytes = smem_bytes(layout.columns, layout.block_n);
  const std::int64_t batch = p.cu_seqlens_k ? 1 : p.batch_size;
  plan->grid = layout.rows && p.batch_size ? 2 * batch * layout.heads * layout.blocks : 0;
  plan->predicted_ns = predicted_ns(p, layout, device.num_sms);
  return true;
}

}  // namespace

extern const core::QuantizeFamily kFamily;
const core::QuantizeFamily kFamily = {"key_blocks", 0, 1, nullptr, plan_quantize};

}  // namespace dlattn::quantize::key_blocks
