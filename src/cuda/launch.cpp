#include "cuda/launch.h"

#include <cuda_runtime_api.h>

#include <string>

#include "dlattn/types.h"

namespace dlattn::cuda {
namespace {

void check(cudaError_t error, const char* kernel_name, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // ours is reported here; the caller's next CUDA call must not see it
  throw DeviceError(std::string(kernel_name) + ": " + what +
                    " failed: " + cudaGetErrorString(error));
}

std::uint64_t bit_of(int device) {
  return device < 64 ? std::uint64_t{1} << device : 0;
}

// A kernel gets more than 48 KB of dynamic shared memory only after asking for it, once per device.
// Two threads may both ask, which does no harm.
void allow_smem(int device, const void* kernel, KernelState* state, std::int64_t smem_bytes,
                const char* kernel_name) {
  if (smem_bytes <= 48 * 1024) return;
  const std::uint64_t bit = bit_of(device);
  if (__atomic_load_n(&state->allowed, __ATOMIC_RELAXED) & bit) return;
  const RelaxedCapture relaxed;  // loads the code
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(smem_bytes)),
        kernel_name, "asking for shared memory");
  __atomic_fetch_or(&state->allowed, bit, __ATOMIC_RELAXED);
}

// Whether a launch of the kernel may start before the grid ahead of it in its stream is over: where
// the code that runs has kernels' wait for it (ptx/grid_dependency.cuh), and graphs can be captured
// with such launches. PTX for an older compute capability, translated by the driver, has not. Asked
// of CUDA once per device.
bool waits_for_grids_ahead(int device, const void* kernel, KernelState* state,
                           const char* kernel_name) {
  constexpr int kPtxVersion = 90, kDriverVersion = 12030;
  const std::uint64_t bit = bit_of(device);
  if (__atomic_load_n(&state->asked, __ATOMIC_ACQUIRE) & bit)
    return __atomic_load_n(&state->waits, __ATOMIC_RELAXED) & bit;
  const RelaxedCapture relaxed;  // loads the code
  cudaFuncAttributes code;
  check(cudaFuncGetAttributes(&code, kernel), kernel_name, "asking for the code's version");
  int driver = 0;
  check(cudaDriverGetVersion(&driver), kernel_name, "asking for the driver's version");
  const bool answer = code.ptxVersion >= kPtxVersion && driver >= kDriverVersion;
  if (answer) __atomic_fetch_or(&state->waits, bit, __ATOMIC_RELAXED);
  __atomic_fetch_or(&state->asked, bit, __ATOMIC_RELEASE);
  return answer;
}

}  // namespace

void launch(const DeviceGuard& guard, const void* kernel, KernelState* state,
            const LaunchConfig& wanted, void** arguments) {
  const int device = guard.device();
  const char* const kernel_name = guard.kernel_name();
  allow_smem(device, kernel, state, wanted.max_smem_bytes, kernel_name);
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (waits_for_grids_ahead(device, kernel, state, kernel_name)) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (wanted.cluster_size > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(wanted.cluster_size), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(wanted.num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(wanted.num_threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(wanted.smem_bytes);
  config.stream = static_cast<cudaStream_t>(wanted.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  check(cudaLaunchKernelExC(&config, kernel, arguments), kernel_name, "launch");
}

}  // namespace dlattn::cuda
