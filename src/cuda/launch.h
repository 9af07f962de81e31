#pragma once

#include <cstdint>

#include "cuda/device_guard.h"

// The launch of a kernel without its types: compiled once, where launch.cuh is compiled for each.
namespace dlattn::cuda {

// The questions that CUDA has answered about a kernel, or for it: a bit per device. Devices from 64
// on have none, and CUDA is asked every time. launch.cpp alone accesses them, atomically: <atomic>
// takes its time in each of 40 files of kernels.
struct KernelState {
  std::uint64_t allowed = 0;           // large shared memory
  std::uint64_t asked = 0, waits = 0;  // whether it waits for grids ahead
};

struct LaunchConfig {
  std::int64_t num_blocks;
  int cluster_size;
  int num_threads;
  std::int64_t smem_bytes;
  std::int64_t max_smem_bytes;  // of all launches of the kernel
  void* stream;
};

// launch_clusters() of launch.cuh.
void launch(const DeviceGuard& guard, const void* kernel, KernelState* state,
            const LaunchConfig& config, void** arguments);

}  // namespace dlattn::cuda
