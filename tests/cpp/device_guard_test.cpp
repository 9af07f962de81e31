// The guard that makes a device current, against a model of the driver's contexts and the runtime's
// choice of a device, which a thread may have one without the other of.
#include "cuda/device_guard.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <thread>
#include <utility>

#include "check.h"
#include "cuda/driver.h"
#include "dlattn/types.h"

namespace {

constexpr int kDevices = 3;

struct Context {
  int device;
};
Context primaries[kDevices] = {{0}, {1}, {2}};
Context of_driver_api = {0};  // one that is not its device's primary context
int users[kDevices];          // of the primary contexts; without users there is none

thread_local Context* current = nullptr;
thread_local int chosen = 0;  // of the runtime
thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
thread_local bool changed_strictly = false;  // contexts changed in a mode that may forbid it

Context* from(CUcontext context) {
  return reinterpret_cast<Context*>(context);
}

CUresult device_of_context(CUdevice* device) {
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current->device;
  return CUDA_SUCCESS;
}
CUresult get_context(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(current);
  return CUDA_SUCCESS;
}
CUresult set_context(CUcontext context) {
  current = from(context);
  return CUDA_SUCCESS;
}
CUresult get_device(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal < kDevices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult retain_primary(CUcontext* context, CUdevice device) {
  changed_strictly |= mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  ++users[device];
  *context = reinterpret_cast<CUcontext>(&primaries[device]);
  return CUDA_SUCCESS;
}
CUresult release_primary(CUdevice device) {
  --users[device];
  return CUDA_SUCCESS;
}
CUresult exchange_capture_mode(CUstreamCaptureMode* other) {
  std::swap(mode, *other);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" cudaError_t cudaGetDevice(int* device) {
  *device = current ? current->device : chosen;
  return cudaSuccess;
}
extern "C" cudaError_t cudaSetDevice(int device) {
  if (device >= kDevices) return cudaErrorInvalidDevice;
  changed_strictly |= mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  chosen = device;
  users[device] += users[device] == 0;
  current = &primaries[device];
  return cudaSuccess;
}
extern "C" cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
extern "C" const char* cudaGetErrorString(cudaError_t) {
  return "invalid device ordinal";
}

void* dlattn::cuda::driver_function(const char* name, int) {
  const struct {
    const char* name;
    void* function;
  } functions[] = {
      {"cuCtxGetDevice", reinterpret_cast<void*>(device_of_context)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(get_context)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(set_context)},
      {"cuDeviceGet", reinterpret_cast<void*>(get_device)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(retain_primary)},
      {"cuDevicePrimaryCtxRelease", reinterpret_cast<void*>(release_primary)},
      {"cuThreadExchangeStreamCaptureMode", reinterpret_cast<void*>(exchange_capture_mode)},
  };
  for (const auto& known : functions) {
    if (std::strcmp(name, known.name) == 0) return known.function;
  }
  throw DeviceError(name);
}

namespace {

using dlattn::cuda::DeviceGuard;

// In a fresh thread whose context is `before` and whose choice is device `choice`: under a guard of
// `device`, that has a context; afterwards the thread's context is `after`.
void check_guard(Context* before, int choice, int device, Context* after) {
  std::thread([=] {
    current = before;
    chosen = choice;
    if (before) ++users[before->device];
    int users_before[kDevices];
    std::memcpy(users_before, users, sizeof users);
    {
      const DeviceGuard guard(device, "kernel");
      CHECK(current && current->device == device && users[device] > 0);
      CHECK_EQ(guard.device(), device);
      CHECK(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    }
    CHECK(current == after && chosen == choice && !changed_strictly);
    CHECK(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    for (int d = 0; d < kDevices; ++d) {
      const int bound = after && !before && d == device && users_before[d] == 0;
      CHECK_EQ(users[d], users_before[d] + bound);
    }
    std::memset(users, 0, sizeof users);
  }).join();
}

}  // namespace

int main() {
  check_guard(&primaries[1], 1, 1, &primaries[1]);    // current already
  check_guard(&of_driver_api, 0, 0, &of_driver_api);  // current, with a context of its own
  check_guard(nullptr, 0, 0, &primaries[0]);          // a fresh thread: gets its device's context
  check_guard(nullptr, 2, 2, &primaries[2]);
  check_guard(nullptr, 0, 1, nullptr);  // and none of a device that the call is not about
  check_guard(&primaries[0], 0, 1, &primaries[0]);
  check_guard(&of_driver_api, 0, 2, &of_driver_api);

  current = &primaries[0];
  CHECK_THROWS(DeviceGuard(kDevices, "sm90"), dlattn::DeviceError,
               "sm90: cuDeviceGet failed: error 101");
  CHECK(current == &primaries[0] && mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
  current = nullptr;
  chosen = kDevices;
  CHECK_THROWS(DeviceGuard(kDevices, "wmma"), dlattn::DeviceError,
               "wmma: cudaSetDevice failed: invalid device ordinal");
  CHECK(!current && mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
  return test::summary();
}
