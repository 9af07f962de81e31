#pragma once

// Global memory between the blocks of a cluster, and between threads and the async proxy: from
// compute capability 9.0 on.
namespace dlattn::ptx {

// PTX ISA, "Parallel Synchronization and Communication Instructions: barrier.cluster". Waits for
// all threads of all blocks of the cluster. What any of them has written, all may read then, in
// global memory too.
__device__ __forceinline__ void cluster_sync_memory() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#endif
}

// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.wait_group". Waits until the
// thread's bulk groups have written to global memory; the thread may read that then.
__device__ __forceinline__ void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// PTX ISA, "Memory Consistency Model: Proxies" and "membar / fence: fence.proxy". Orders what the
// thread has written to global memory before what the async proxy (TMA) does there after it.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace dlattn::ptx
