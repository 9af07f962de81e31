// Describes the devices, as the CUDA runtime reports them.
#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>

#include "core/backend.h"
#include "core/plan/code.h"
#include "core/util/published.h"

namespace dlattn::cuda {
namespace {

struct Devices {
  cudaError_t status = cudaSuccess;
  int count = 0;
  std::unique_ptr<std::atomic<const DeviceInfo*>[]> infos;
};

const Devices& devices() {
  static std::atomic<const Devices*> known{nullptr};
  return core::published(known, [] {
    Devices d;
    d.status = cudaGetDeviceCount(&d.count);
    if (d.status != cudaSuccess) {
      d.count = 0;
      cudaGetLastError();  // a missing driver must not look like an error of the caller's next CUDA
                           // call
    }
    d.infos.reset(new std::atomic<const DeviceInfo*>[d.count]());
    return d;
  });
}

int attribute(cudaDeviceAttr attr, int index) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, attr, index);
  if (error != cudaSuccess) {
    throw DeviceError(std::string("cuda:") + std::to_string(index) + ": " +
                      cudaGetErrorString(error));
  }
  return value;
}

DeviceInfo query(int index) {
  DeviceInfo info;
  info.type = DeviceType::kCuda;
  info.index = index;
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, index);
  if (error != cudaSuccess) {
    throw DeviceError(std::string("cuda:") + std::to_string(index) + ": " +
                      cudaGetErrorString(error));
  }
  info.name = properties.name;
  info.compute_major = properties.major;
  info.compute_minor = properties.minor;
  info.num_sms = properties.multiProcessorCount;
  info.max_smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  info.smem_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, index);
  info.l2_bytes = attribute(cudaDevAttrL2CacheSize, index);
  const core::Code code =
      core::code_for(archs(), family_archs(), info.compute_major, info.compute_minor);
  core::CudaVersions versions{CUDART_VERSION, 0};
  cudaDriverGetVersion(&versions.driver);
  info.unserved = core::unserved(info, code, archs(), versions);
  info.code = code.capability;
  info.ptx = code.ptx;
  info.arch_specific_code = code.arch_specific;
  return info;
}

}  // namespace

bool compiled() {
  return true;
}
const char* toolkit_version() {
  return DLATTN_CUDA_VERSION;
}
const char* archs() {
  return DLATTN_CUDA_ARCHS;
}
const char* family_archs() {
  return DLATTN_CUDA_FAMILY_ARCHS;
}
const char* archs_reason() {
  return DLATTN_CUDA_ARCHS_REASON;
}

int device_count() {
  return devices().count;
}

std::string device_status() {
  const Devices& d = devices();
  if (d.status != cudaSuccess)
    return std::string("no CUDA device: ") + cudaGetErrorString(d.status);
  return d.count == 0 ? "no CUDA device" : "";
}

const DeviceInfo& device_info(int index) {
  const int count = device_count();
  if (index < 0 || index >= count) {
    throw DeviceError("there is no device cuda:" + std::to_string(index) + "; devices found: " +
                      std::to_string(count) + (count == 0 ? " (" + device_status() + ")" : ""));
  }
  return core::published(devices().infos[index], [&] { return query(index); });
}

}  // namespace dlattn::cuda
