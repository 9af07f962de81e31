#pragma once

#include <cstdint>

#include "cuda/device_guard.h"
#include "cuda/launch.h"
#include "cuda/ptx/elements.cuh"
#include "dlattn/types.h"

// Shared by the launchers of all families: the element types and the launch.
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

template <auto kernel>
inline KernelState kernel_state;

// Enqueues `kernel` on the device of the guard; never synchronises. Every thread of every block of
// it waits for the grids ahead before it accesses global memory, so that its end implies theirs,
// and lets the next grid start only then, so that at most two overlap; with a few blocks behind a
// grid that fills the device, three (ptx/grid_dependency.cuh). `smem_bytes` is at most
// kMaxSmem, or, without one, the same in every launch of one kernel. `cluster_size` blocks, a power
// of two up to 8 that divides their number, form a cluster (ptx/cluster.cuh).
template <auto kernel, int kMaxSmem = 0, typename... Args>
void launch_clusters(const DeviceGuard& guard, std::int64_t num_blocks, int cluster_size,
                     int num_threads, std::int64_t smem_bytes, void* stream, const Args&... args) {
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  launch(
      guard, reinterpret_cast<const void*>(kernel), &kernel_state<kernel>,
      {num_blocks, cluster_size, num_threads, smem_bytes, kMaxSmem ? kMaxSmem : smem_bytes, stream},
      arguments);
}

// The same without clusters.
template <auto kernel, int kMaxSmem = 0, typename... Args>
void launch_kernel(const DeviceGuard& guard, std::int64_t num_blocks, int num_threads,
                   std::int64_t smem_bytes, void* stream, const Args&... args) {
  launch_clusters<kernel, kMaxSmem>(guard, num_blocks, 1, num_threads, smem_bytes, stream, args...);
}

}  // namespace dlattn::cuda
