#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "cuda/device_guard.h"
#include "dlattn/types.h"

// Shared by the launchers of all families: the element types, large shared memory, the launch and
// errors.
namespace dlattn::cuda {

template <DType dtype>
struct ElementOf;
template <>
struct ElementOf<DType::kFloat16> {
  using Type = half;
};
template <>
struct ElementOf<DType::kBFloat16> {
  using Type = __nv_bfloat16;
};
template <>
struct ElementOf<DType::kFloat32> {
  using Type = float;
};
template <>
struct ElementOf<DType::kFloat8E4M3> {
  using Type = __nv_fp8_e4m3;
};
template <DType dtype>
using Element = typename ElementOf<dtype>::Type;

inline void check(cudaError_t error, const char* kernel_name, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // ours is reported here; the caller's next CUDA call must not see it
  throw DeviceError(std::string(kernel_name) + ": " + what +
                    " failed: " + cudaGetErrorString(error));
}

// A kernel gets more than 48 KB of dynamic shared memory only after asking for it, once per device.
// Two threads may both ask, which does no harm. Devices from 64 on ask every time.
template <auto kernel>
void allow_smem(int device, std::int64_t smem_bytes, const char* kernel_name) {
  if (smem_bytes <= 48 * 1024) return;
  static std::atomic<std::uint64_t> allowed{0};
  const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return;
  const RelaxedCapture relaxed;  // loads the code
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(smem_bytes)),
        kernel_name, "asking for shared memory");
  allowed.fetch_or(bit, std::memory_order_relaxed);
}

// Whether a launch of `kernel` may start before the grid ahead of it in its stream is over: where
// the code that runs has kernels' wait for it (ptx/grid_dependency.cuh), and graphs can be captured
// with such launches. PTX for an older compute capability, translated by the driver, has not. Asked
// of CUDA once per device.
template <auto kernel>
bool waits_for_grids_ahead(int device, const char* kernel_name) {
  constexpr int kPtxVersion = 90, kDriverVersion = 12030;
  static std::atomic<std::uint64_t> asked{0}, waits{0};
  const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if (asked.load(std::memory_order_acquire) & bit)
    return waits.load(std::memory_order_relaxed) & bit;
  const RelaxedCapture relaxed;  // loads the code
  cudaFuncAttributes code;
  check(cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(kernel)), kernel_name,
        "asking for the code's version");
  int driver = 0;
  check(cudaDriverGetVersion(&driver), kernel_name, "asking for the driver's version");
  const bool answer = code.ptxVersion >= kPtxVersion && driver >= kDriverVersion;
  if (answer) waits.fetch_or(bit, std::memory_order_relaxed);
  asked.fetch_or(bit, std::memory_order_release);
  return answer;
}

// Enqueues `kernel` on the device of the guard; never synchronises. Every thread of every block of
// it waits for the grids ahead before it accesses global memory, so that its end implies theirs,
// and lets the next grid start only then, so that at most two overlap; with a few blocks behind a
// grid that fills the device, three (ptx/grid_dependency.cuh). `smem_bytes` is at most
// kMaxSmem, or, without one, the same in every launch of one kernel. `cluster_size` blocks, a power
// of two up to 8 that divides their number, form a cluster (ptx/cluster.cuh).
template <auto kernel, int kMaxSmem = 0, typename... Args>
void launch_clusters(const DeviceGuard& guard, std::int64_t num_blocks, int cluster_size,
                     int num_threads, std::int64_t smem_bytes, void* stream, const Args&... args) {
  const int device = guard.device();
  const char* const kernel_name = guard.kernel_name();
  allow_smem<kernel>(device, kMaxSmem ? kMaxSmem : smem_bytes, kernel_name);
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (waits_for_grids_ahead<kernel>(device, kernel_name)) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster_size > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(smem_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments), kernel_name,
        "launch");
}

// The same without clusters.
template <auto kernel, int kMaxSmem = 0, typename... Args>
void launch_kernel(const DeviceGuard& guard, std::int64_t num_blocks, int num_threads,
                   std::int64_t smem_bytes, void* stream, const Args&... args) {
  launch_clusters<kernel, kMaxSmem>(guard, num_blocks, 1, num_threads, smem_bytes, stream, args...);
}

}  // namespace dlattn::cuda
