#include "cuda/driver.h"

#include <cuda_runtime_api.h>

#include <string>

#include "dlattn/types.h"

namespace dlattn::cuda {

void* driver_function(const char* name, int since) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      name, &function, static_cast<unsigned>(since), cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // ours is reported here; the caller's next CUDA call must not see it
    throw DeviceError(std::string("the driver has no ") + name + "; it came with CUDA " +
                      std::to_string(since / 1000) + "." + std::to_string(since % 1000 / 10));
  }
  return function;
}

}  // namespace dlattn::cuda
