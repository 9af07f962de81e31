#include "recorder.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>

namespace recorder {

void (*on_launch)(const Launch& launch) = nullptr;

namespace {

struct DeviceKind {
  const char* name;
  int major, minor, num_sms, smem_per_block;
};
constexpr DeviceKind kDevices[kNumDevices] = {{"made-up H200", 9, 0, 132, 232448},
                                              {"made-up RTX 4090", 8, 9, 128, 101376},
                                              {"made-up A100", 8, 0, 108, 166912}};

std::vector<Launch> recorded;
std::map<const void*, std::int64_t> allowed;
int current = 0;

CUresult device_of_context(CUdevice* device) {
  *device = current;
  return CUDA_SUCCESS;
}
CUresult context(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(static_cast<std::intptr_t>(current + 1));
  return CUDA_SUCCESS;
}
CUresult set_context(CUcontext context) {
  current = static_cast<int>(reinterpret_cast<std::intptr_t>(context)) - 1;
  return CUDA_SUCCESS;
}
CUresult device(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult retain_primary(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<std::intptr_t>(device + 1));
  return CUDA_SUCCESS;
}
CUresult release_primary(CUdevice) {
  return CUDA_SUCCESS;
}
CUresult exchange_capture_mode(CUstreamCaptureMode*) {
  return CUDA_SUCCESS;
}

// Keeps its arguments, or as many bits of them as there is room for, in place of a tensor map.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                      CUtensorMapFloatOOBfill fill) {
  std::uint64_t words[sizeof(CUtensorMap) / 8] = {};
  words[0] = reinterpret_cast<std::uintptr_t>(address);
  words[1] = static_cast<std::uint64_t>(type) | std::uint64_t{rank} << 8 |
             static_cast<std::uint64_t>(interleave) << 16 |
             static_cast<std::uint64_t>(swizzle) << 24 |
             static_cast<std::uint64_t>(promotion) << 32 | static_cast<std::uint64_t>(fill) << 40;
  for (cuuint32_t i = 0; i < rank; ++i) {
    words[2 + i] = sizes[i];
    if (i > 0) words[6 + i] = strides[i - 1];
    words[11 + i] = std::uint64_t{box[i]} << 32 | steps[i];
  }
  std::memcpy(map, words, sizeof words);
  return CUDA_SUCCESS;
}

}  // namespace

const std::vector<Launch>& launches() {
  return recorded;
}
void clear() {
  recorded.clear();
}
std::int64_t allowed_smem(const void* kernel) {
  return allowed.count(kernel) ? allowed[kernel] : 48 * 1024;
}

std::string name_of(const void* kernel) {
  Dl_info info;
  if (!dladdr(kernel, &info) || info.dli_saddr != kernel || !info.dli_sname) return {};
  char* const name = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, nullptr);
  std::string text = name ? name : info.dli_sname;
  std::free(name);
  return text.rfind("void ", 0) == 0 ? text.substr(5) : text;
}

}  // namespace recorder

using namespace recorder;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kNumDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const DeviceKind& kind = kDevices[device];
  *properties = {};
  std::strncpy(properties->name, kind.name, sizeof properties->name - 1);
  properties->major = kind.major, properties->minor = kind.minor;
  properties->multiProcessorCount = kind.num_sms;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const int smem = kDevices[device].smem_per_block;
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin       ? smem
           : attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? smem + 1024
                                                                      : 50 << 20;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  allowed[kernel] = value;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "made-up error";
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned) {
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const struct {
    const char* name;
    void* function;
  } functions[] = {
      {"cuCtxGetDevice", reinterpret_cast<void*>(device_of_context)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(context)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(set_context)},
      {"cuDeviceGet", reinterpret_cast<void*>(device)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(retain_primary)},
      {"cuDevicePrimaryCtxRelease", reinterpret_cast<void*>(release_primary)},
      {"cuThreadExchangeStreamCaptureMode", reinterpret_cast<void*>(exchange_capture_mode)},
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(encode_tiled)},
  };
  *found = cudaDriverEntryPointSymbolNotFound;
  for (const auto& known : functions) {
    if (std::strcmp(name, known.name) != 0) continue;
    *function = known.function, *found = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  Launch launch{};
  launch.kernel = kernel;
  launch.stream = config->stream;
  const dim3 grid = config->gridDim, block = config->blockDim;
  launch.grid[0] = grid.x, launch.grid[1] = grid.y, launch.grid[2] = grid.z;
  launch.block[0] = block.x, launch.block[1] = block.y, launch.block[2] = block.z;
  launch.smem_bytes = config->dynamicSmemBytes;
  launch.cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension)
      launch.cluster = attribute.val.clusterDim.x;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
      launch.starts_early = attribute.val.programmaticStreamSerializationAllowed != 0;
  }
  launch.arguments = arguments;
  if (on_launch) on_launch(launch);
  recorded.push_back(launch);
  return cudaSuccess;
}

}  // extern "C"
