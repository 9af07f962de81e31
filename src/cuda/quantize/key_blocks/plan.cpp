#include <algorithm>

#include "core/plan/code.h"
#include "core/plan/family.h"
#include "cuda/quantize/key_blocks/shape.h"

namespace dlattn::quantize::key_blocks {
namespace {

// A guess that nobody has measured: bytes at four fifths of an H200's memory bandwidth, which other
// devices are taken to have per SM, and the launch.
double predicted_ns(const QuantizeTask& task, int num_sms) {
  constexpr double kBytesPerNs = 0.8 * 4000.0, kSms = 132.0, kLaunch = 2500.0;
  const auto rows = [](std::int64_t rows, std::int64_t heads, std::int64_t batch) {
    return static_cast<double>(rows) * static_cast<double>(heads) * static_cast<double>(batch);
  };
  double bytes = 0.0;
  if (task.queries) {
    const QueryLayout layout = query_layout(task);
    bytes = rows(layout.rows, layout.heads, task.cu_seqlens_q ? 1 : task.batch_size) *
            static_cast<double>(2 * task.head_dim + layout.columns);
  } else {
    const QuantizedLayout layout = quantized_layout(task);
    bytes = rows(layout.rows, layout.heads, task.cu_seqlens_k ? 1 : task.batch_size) *
            static_cast<double>(2 * (task.head_dim + task.head_dim_v) +
                                (1 + value_bytes(task.precision)) * layout.columns);
  }
  return bytes / (kBytesPerNs * std::max(num_sms, 1) / kSms) + kLaunch;
}

bool plan_quantize(const QuantizeTask& task, const DeviceInfo& device, const Options&, Plan* plan,
                   std::string* why) {
  if (!core::has_code(device, min_capability(task.precision), why)) return false;
  const int columns = quantized_columns(task.head_dim, task.head_dim_v);
  const int rows = block_rows(task.precision, columns, task.queries);
  plan->variant = task.queries;
  plan->variant_name = kQuantizedTensors[plan->variant];
  (task.queries ? plan->block_m : plan->block_n) = rows;
  plan->num_warps = num_threads(columns, rows) / 32;
  plan->smem_bytes = smem_bytes(columns, rows);
  plan->grid = (task.queries ? grid_of_queries(task) : grid_of_keys(task)).blocks;
  plan->predicted_ns = predicted_ns(task, device.num_sms);
  return true;
}

}  // namespace

extern const core::Family<QuantizeTask> kFamily;
const core::Family<QuantizeTask> kFamily = {"key_blocks", 0, 1, nullptr, plan_quantize};

}  // namespace dlattn::quantize::key_blocks
