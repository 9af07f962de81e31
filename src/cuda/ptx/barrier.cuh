#pragma once

namespace dlattn::ptx {

// PTX ISA, "Parallel Synchronization and Communication Instructions: bar". A barrier of
// `num_threads` of the block's threads, whole warps, told apart by `id` from the block's other
// barriers; 0 is that of __syncthreads. Orders memory among those threads. `bar.sync` is
// `barrier.sync.aligned`: all threads that wait at one time must execute the same instruction, not
// two copies of it in two branches.
__device__ __forceinline__ void barrier_sync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// The same section, bar.arrive: counts as one of them, but does not wait for the others. Waiting
// threads see earlier writes.
__device__ __forceinline__ void barrier_arrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

}  // namespace dlattn::ptx
