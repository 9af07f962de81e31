#include "cuda/device_guard.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <string>

#include "core/util/published.h"
#include "cuda/driver.h"
#include "dlattn/types.h"

namespace dlattn::cuda {
namespace {

struct Driver {
  CUresult (*device_of_context)(CUdevice* device);
  CUresult (*context)(CUcontext* context);
  CUresult (*set_context)(CUcontext context);
  CUresult (*device)(CUdevice* device, int ordinal);
  CUresult (*retain_primary)(CUcontext* context, CUdevice device);
  CUresult (*release_primary)(CUdevice device);
  CUresult (*exchange_capture_mode)(CUstreamCaptureMode* mode);
};

template <typename Function>
void find(const char* name, int since, Function* function) {
  *function = reinterpret_cast<Function>(driver_function(name, since));
}

const Driver& driver() {
  static std::atomic<const Driver*> known{nullptr};
  return core::published(known, [] {
    Driver found;
    find("cuCtxGetDevice", 2000, &found.device_of_context);
    find("cuCtxGetCurrent", 4000, &found.context);
    find("cuCtxSetCurrent", 4000, &found.set_context);
    find("cuDeviceGet", 2000, &found.device);
    find("cuDevicePrimaryCtxRetain", 7000, &found.retain_primary);
    find("cuDevicePrimaryCtxRelease", 11000, &found.release_primary);
    find("cuThreadExchangeStreamCaptureMode", 10010, &found.exchange_capture_mode);
    return found;
  });
}

[[noreturn]] void fail(const char* kernel_name, const char* what, const std::string& why) {
  throw DeviceError(std::string(kernel_name) + ": " + what + " failed: " + why);
}

void check_driver(CUresult result, const char* kernel_name, const char* what) {
  if (result != CUDA_SUCCESS) fail(kernel_name, what, "error " + std::to_string(result));
}

void check_runtime(cudaError_t error, const char* kernel_name, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // ours is reported here; the caller's next CUDA call must not see it
  fail(kernel_name, what, cudaGetErrorString(error));
}

}  // namespace

DeviceGuard::DeviceGuard(int device, const char* kernel_name)
    : device_(device), kernel_name_(kernel_name) {
  const Driver& cuda = driver();
  CUdevice current = -1;
  const bool has_context = cuda.device_of_context(&current) == CUDA_SUCCESS;
  if (has_context && current == device) return;

  const RelaxedCapture relaxed;
  if (!has_context) {
    // A thread that has not used CUDA. Its device's context stays current, as the runtime's calls
    // leave it, too.
    int chosen = 0;
    check_runtime(cudaGetDevice(&chosen), kernel_name, "cudaGetDevice");
    if (chosen == device) {
      check_runtime(cudaSetDevice(device), kernel_name, "cudaSetDevice");
      return;
    }
  }
  // The runtime's choice of a device is left alone: to restore one of which the thread has no
  // context, it would make that.
  CUcontext previous = nullptr, primary = nullptr;
  CUdevice handle = 0;
  if (has_context) check_driver(cuda.context(&previous), kernel_name, "cuCtxGetCurrent");
  check_driver(cuda.device(&handle, device), kernel_name, "cuDeviceGet");
  check_driver(cuda.retain_primary(&primary, handle), kernel_name, "cuDevicePrimaryCtxRetain");
  const CUresult set = cuda.set_context(primary);
  if (set != CUDA_SUCCESS) cuda.release_primary(handle);
  check_driver(set, kernel_name, "cuCtxSetCurrent");
  previous_ = previous;
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (!changed_) return;
  const Driver& cuda = driver();
  CUdevice handle = 0;
  cuda.set_context(static_cast<CUcontext>(previous_));
  if (cuda.device(&handle, device_) == CUDA_SUCCESS) cuda.release_primary(handle);
}

RelaxedCapture::RelaxedCapture() {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  previous_ = driver().exchange_capture_mode(&mode) == CUDA_SUCCESS ? mode : -1;
}

RelaxedCapture::~RelaxedCapture() {
  if (previous_ < 0) return;  // no driver yet, and so no capture
  auto mode = static_cast<CUstreamCaptureMode>(previous_);
  driver().exchange_capture_mode(&mode);
}

}  // namespace dlattn::cuda
