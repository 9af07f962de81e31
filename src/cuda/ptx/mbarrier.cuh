#pragma once

#include <cstdint>

#include "cuda/ptx/smem.cuh"

// Barriers that live in shared memory, 8 bytes each. A phase completes when `count` arrivals have
// come, and the next begins. Phases are told apart by their parity: the first has parity 0.
namespace dlattn::ptx {

constexpr int kMbarrierBytes = 8;

// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier.init". By one thread;
// the others may use it after a barrier of the block.
__device__ __forceinline__ void mbarrier_init(SmemAddress mbarrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(mbarrier), "r"(count) : "memory");
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier.arrive". Releases
// what the thread has done.
__device__ __forceinline__ void mbarrier_arrive(SmemAddress mbarrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(mbarrier)
               : "memory");
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: cp.async.mbarrier.arrive".
// Arrives when all copies that this thread has started by cp.async are complete; `count` includes
// it.
__device__ __forceinline__ void mbarrier_arrive_after_copies(SmemAddress mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(mbarrier) : "memory");
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier.try_wait", for
// compute capability 9.0 and later. Waits until the current or the last phase, whichever has this
// parity, is complete, and acquires what was released by its arrivals.
__device__ __forceinline__ void mbarrier_sleep(SmemAddress mbarrier, int parity) {
  asm volatile(
      "{ .reg .pred complete;\n"
      "again_%=: mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@!complete bra again_%=; }" ::"r"(mbarrier),
      "r"(parity)
      : "memory");
}

// The same section, mbarrier.test_wait: the same for all, where a waiting thread below 9.0 asks
// again and again, at the cost of those that have work to do.
__device__ __forceinline__ void mbarrier_wait(SmemAddress mbarrier, int parity) {
#if __CUDA_ARCH__ >= 900
  mbarrier_sleep(mbarrier, parity);
#else
  asm volatile(
      "{ .reg .pred complete;\n"
      "again_%=: mbarrier.test_wait.parity.shared.b64 complete, [%0], %1;\n"
      "@!complete bra again_%=; }" ::"r"(mbarrier),
      "r"(parity)
      : "memory");
#endif
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier.arrive" with
// .expect_tx. Arrives; the phase then completes only when `bytes` more have been copied, too.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(SmemAddress mbarrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes)
               : "memory");
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: fence.mbarrier_init". After
// mbarrier_init, so that TMA too sees the barriers; then a barrier of the block.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace dlattn::ptx
