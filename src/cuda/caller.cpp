// Asks the driver about the caller's pointers, and orders work on the caller's streams.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <string>

#include "core/backend.h"
#include "core/util/published.h"
#include "cuda/device_guard.h"
#include "cuda/driver.h"

namespace dlattn::cuda {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // ours is reported here; the caller's next CUDA call must not see it
  throw DeviceError(std::string(what) + " failed: " + cudaGetErrorString(error));
}

using PointerAttribute = CUresult (*)(void* data, CUpointer_attribute attribute, CUdeviceptr);

// The legacy default stream has two names.
bool same_stream(void* a, void* b) {
  const auto is_legacy = [](void* stream) { return !stream || stream == cudaStreamLegacy; };
  return a == b || (is_legacy(a) && is_legacy(b));
}

}  // namespace

int device_of(const void* pointer) {
  if (!pointer) {
    int current = 0;
    check(cudaGetDevice(&current), "cudaGetDevice");
    return current;
  }
  // Not the runtime's cudaPointerGetAttributes: in a thread without a context it would make one, on
  // a device that may have nothing to do with the pointer.
  static std::atomic<const PointerAttribute*> known{nullptr};
  const PointerAttribute& attribute = core::published(known, [] {
    return reinterpret_cast<PointerAttribute>(driver_function("cuPointerGetAttribute", 4000));
  });
  int device = -1;
  const CUresult result = attribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                    reinterpret_cast<CUdeviceptr>(pointer));
  if (result == CUDA_ERROR_INVALID_VALUE) return -1;
  if (result != CUDA_SUCCESS) {
    throw DeviceError("cuPointerGetAttribute failed: error " + std::to_string(result));
  }
  return device;
}

void wait_for_stream(int device, void* stream, void* earlier) {
  if (same_stream(stream, earlier)) return;
  const DeviceGuard guard(device, "wait_for_stream");
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  const cudaError_t recorded = cudaEventRecord(event, static_cast<cudaStream_t>(earlier));
  const cudaError_t waiting = recorded == cudaSuccess
                                  ? cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event, 0)
                                  : cudaSuccess;
  cudaEventDestroy(event);  // which the driver puts off until the event has come
  check(recorded, "cudaEventRecord");
  check(waiting, "cudaStreamWaitEvent");
}

}  // namespace dlattn::cuda
