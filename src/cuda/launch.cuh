#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "dlattn/types.h"

// What every family's launcher shares: the element types, the device, large shared memory and
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
template <DType dtype>
using Element = typename ElementOf<dtype>::Type;

inline void check(cudaError_t error, const char* kernel_name, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // ours is reported here; the caller's next CUDA call must not see it
  throw DeviceError(std::string(kernel_name) + ": " + what +
                    " failed: " + cudaGetErrorString(error));
}

// Makes `device` current for its lifetime; costs one query if it is current already.
class DeviceGuard {
 public:
  DeviceGuard(int device, const char* kernel_name) {
    check(cudaGetDevice(&previous_), kernel_name, "cudaGetDevice");
    if (previous_ == device) return;
    check(cudaSetDevice(device), kernel_name, "cudaSetDevice");
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// A kernel gets more than 48 KB of dynamic shared memory only after asking for it, once per device.
// Two threads may both ask, which does no harm. Devices from 64 on ask every time.
template <auto kernel>
void allow_smem(int device, std::int64_t smem_bytes, const char* kernel_name) {
  if (smem_bytes <= 48 * 1024) return;
  static std::atomic<std::uint64_t> allowed{0};
  const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(smem_bytes)),
        kernel_name, "asking for shared memory");
  allowed.fetch_or(bit, std::memory_order_relaxed);
}

// Enqueues `kernel`; never synchronises. `smem_bytes` is at most kMaxSmem, or, without one, the
// same in every launch of one kernel.
template <auto kernel, int kMaxSmem = 0, typename... Args>
void launch_kernel(const char* kernel_name, int device, std::int64_t num_blocks, int num_threads,
                   std::int64_t smem_bytes, void* stream, const Args&... args) {
  const DeviceGuard guard(device, kernel_name);
  allow_smem<kernel>(device, kMaxSmem ? kMaxSmem : smem_bytes, kernel_name);
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                         dim3(static_cast<unsigned>(num_blocks)),
                         dim3(static_cast<unsigned>(num_threads)), arguments,
                         static_cast<std::size_t>(smem_bytes), static_cast<cudaStream_t>(stream)),
        kernel_name, "launch");
}

}  // namespace dlattn::cuda
