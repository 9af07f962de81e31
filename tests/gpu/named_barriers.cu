// Shows how compute-sanitizer's racecheck sees barriers of part of a thread block. No kernel here
// but the last has a race: groups of warps work in memory of their own, each with a barrier of its
// own, then __syncthreads, then all warps read what all groups left. Prints each kernel's name;
// racecheck's reports on it stand before that.
//   compute-sanitizer --tool racecheck --print-limit 1000 gpu_named_barriers
//
// Version 2025.3.1 on an H200, each of three runs: none on the first two kernels, some 40 on the
// third, some 70 on the last. So it loses sight of __syncthreads where groups have passed barriers
// of their own unequally often, and its reports on wmma's split_kernel, whose groups have shares of
// the keys that may differ by a tile, are none of races: with as many tiles in each group there are
// none either, with or without cp.async. ThreadSanitizer sees that kernel in tests/simt.
#include <cuda_runtime_api.h>

#include <cstdio>

#include "cuda/ptx/barrier.cuh"

namespace {

constexpr int kThreads = 256, kGroups = 4, kGroupThreads = kThreads / kGroups;
constexpr int kBlocks = 6, kLaunches = 20;

// How often a group passes its barrier.
__device__ int num_steps(bool equal, int group) {
  return equal ? kGroups : kGroups - group;
}

// kEqualWork: all groups take as many steps. kEqualBarriers: those with fewer steps make up for
// their barriers at the end. kLastBarrier: whether the reads at the end wait for all groups.
template <bool kEqualWork, bool kEqualBarriers, bool kLastBarrier>
__global__ void groups_then_all(float* out) {
  __shared__ float memory[kGroups][2][kGroupThreads];
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int steps = num_steps(kEqualWork, group);
  float sum = 0.0f;
  for (int i = 0; i < steps; ++i) {  // two halves in turn: one barrier a step is enough
    memory[group][i % 2][thread] = sum + thread;
    dlattn::ptx::barrier_sync(1 + group, kGroupThreads);
    sum += memory[group][i % 2][thread ^ 32];
  }
  if (kEqualBarriers)
    for (int i = steps; i < kGroups; ++i) dlattn::ptx::barrier_sync(1 + group, kGroupThreads);
  dlattn::ptx::barrier_sync(1 + group, kGroupThreads);
  for (float* half : memory[group]) half[thread] = sum;
  if (kLastBarrier) __syncthreads();
  for (const auto& part : memory) sum += part[0][thread] + part[1][thread];
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

template <typename Kernel>
void run(const char* name, Kernel kernel, float* out) {
  for (int i = 0; i < kLaunches; ++i) kernel<<<kBlocks, kThreads>>>(out);
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("%s: %s\n", name, cudaGetErrorString(error));
  std::fflush(stdout);
}

}  // namespace

int main() {
  float* out = nullptr;
  cudaMalloc(&out, kBlocks * kThreads * sizeof(float));
  run("as many barriers in each group", groups_then_all<true, false, true>, out);
  run("fewer steps, as many barriers", groups_then_all<false, true, true>, out);
  run("fewer barriers in some groups", groups_then_all<false, false, true>, out);
  run("a race", groups_then_all<true, false, false>, out);
  cudaFree(out);
}
