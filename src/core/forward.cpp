#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "core/backend.h"
#include "core/family.h"
#include "core/plan.h"
#include "core/published.h"
#include "core/validate.h"
#include "dlattn/attention.h"

namespace dlattn {
namespace {

// DLATTN_PRINT_PLAN=1 prints the plan of every call to stderr; "", 0, false, no and off, in any
// case, do not.
bool print_plans() {
  static std::atomic<const bool*> on{nullptr};
  return core::published(on, [] {
    const char* value = std::getenv("DLATTN_PRINT_PLAN");
    std::string text = value ? value : "";
    for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    for (const char* off : {"", "0", "false", "no", "off"}) {
      if (text == off) return false;
    }
    return true;
  });
}

const DeviceInfo& cpu_info() {
  static std::atomic<const DeviceInfo*> info{nullptr};
  return core::published(info, cpu::device_info);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ';');) parts.push_back(part);
  return parts;
}

}  // namespace

int device_count() {
  return cuda::device_count();
}
std::string device_status() {
  return cuda::device_status();
}

const DeviceInfo& device_info(Device device) {
  return device.type == DeviceType::kCpu ? cpu_info() : cuda::device_info(device.index);
}

BuildInfo build_info() {
  BuildInfo info;
  info.cuda = cuda::compiled();
  info.cuda_version = cuda::toolkit_version();
  info.archs = split(cuda::archs());
  info.kernels = {std::string(core::kCpu)};
  for (const core::ListedFamily& family : core::forward_families()) {
    const core::Instance& first = family.instances.front();
    if (cuda::find_launcher(family.record->name, first.dtype, first.head_dim_tile))
      info.kernels.push_back(family.record->name);
  }
  return info;
}

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

std::string describe(const Plan& plan) {
  std::ostringstream out;
  out << "kernel: " << plan.kernel << (*plan.variant_name ? ":" : "") << plan.variant_name << "\n"
      << "dtype: " << to_string(plan.dtype) << "\n"
      << "tile: " << plan.block_m << " queries x " << plan.block_n << " keys";
  if (plan.head_dim_tile) out << ", head_dim <= " << plan.head_dim_tile;
  if (plan.packed_heads > 1) out << ", rows of " << plan.packed_heads << " heads";
  out << "\n";
  if (plan.kernel == core::kCpu) {
    out << "threads: " << plan.num_threads << ", " << plan.isa << ", " << plan.grid << " tasks\n";
  } else {
    out << "grid: " << plan.grid << " blocks of " << plan.num_warps << " warps\n"
        << "shared memory: " << plan.smem_bytes << " bytes per block, " << plan.num_stages
        << " stage(s), copies of " << plan.copy_bytes << " bytes\n";
  }
  if (plan.predicted_ns > 0.0) out << "predicted: " << plan.predicted_ns / 1e3 << " us\n";
  out << "splits: " << plan.num_splits << ", workspace: " << plan.workspace_bytes << " bytes\n";
  return out.str();
}

void forward(const AttentionParams& params, void* stream, const Options& options) {
  core::validate(params);
  const DeviceInfo& device = device_info(params.device);
  const Plan plan = core::make_plan(params, device, options);
  if (print_plans()) std::fprintf(stderr, "%s\n", describe(plan).c_str());
  if (plan.kernel == core::kCpu) {
    cpu::forward(params, plan, options.poll);
    return;
  }
  if (plan.grid == 0) return;
  cuda::find_launcher(plan.kernel, plan.dtype, plan.head_dim_tile)(params, plan, stream);
}

void merge_states(const MergeParams& params, void* stream, Poll poll) {
  core::validate(params);
  if (params.batch_size * params.seqlen_q == 0) return;
  if (params.device.type == DeviceType::kCpu) {
    cpu::merge_states(params, poll);
  } else {
    cuda::merge_states(params, stream);
  }
}

}  // namespace dlattn
