#include <algorithm>
#include <atomic>
#include <sstream>

#include "core/backend.h"
#include "core/plan/family.h"
#include "core/plan/plan.h"
#include "core/util/published.h"
#include "core/validate/checks.h"

namespace dlattn {
namespace {

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
  core::check_device_type(device.type);
  return device.type == DeviceType::kCpu ? cpu_info() : cuda::device_info(device.index);
}

int cuda_device_of(const void* pointer) {
  return device_count() == 0 ? 0 : cuda::device_of(pointer);
}

void wait_for_stream(Device device, void* stream, void* earlier) {
  device_info(device);  // throws if there is no such device
  if (device.type == DeviceType::kCuda) cuda::wait_for_stream(device.index, stream, earlier);
}

BuildInfo build_info() {
  BuildInfo info;
  info.cuda = cuda::compiled();
  info.cuda_version = cuda::toolkit_version();
  info.archs = split(cuda::archs());
  for (std::string& arch : split(cuda::family_archs())) {
    if (std::find(info.archs.begin(), info.archs.end(), arch) == info.archs.end())
      info.archs.push_back(std::move(arch));
  }
  info.archs_reason = cuda::archs_reason();
  info.kernels = {std::string(core::kCpu)};
  for (const auto& family : core::families<AttentionParams>()) {
    const core::Instance& first = family.instances.front();
    const bool built =
        cuda::find_launcher<AttentionParams>(family.record->name, first.dtype, first.head_dim_tile);
    if (built) {
      info.kernels.push_back(family.record->name);
    } else if (info.cuda) {
      info.missing_kernels.push_back(family.record->name);
    }
  }
  return info;
}

}  // namespace dlattn
