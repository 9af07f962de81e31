#pragma once

#include "cuda/ptx/smem.cuh"

// Copies from shared to global memory by the TMA without a tensor map, of which other thread blocks
// are told by a counter (counter.cuh).
namespace dlattn::ptx {

// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk". Copies `bytes` from shared
// to global memory, in the thread's current bulk group; both at multiples of 16 bytes, of which
// there is a multiple too.
__device__ __forceinline__ void bulk_store(float* to, SmemAddress src, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(src),
               "r"(bytes)
               : "memory");
}

// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.wait_group". Waits until the
// thread's bulk groups have all been written, which it then sees.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// PTX ISA, "membar / fence: fence.proxy". What the thread has acquired of global memory comes
// before what the async proxy (TMA) does there for it from now on.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace dlattn::ptx
