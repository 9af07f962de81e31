#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"

// Asynchronous copies of what is read once.
namespace dlattn::ptx {

// PTX ISA, "Data Movement and Conversion Instructions: cp.async", .L2::cache_hint, and
// "createpolicy", .evict_first. Copies 16 bytes as cp_async() does, by a line of L2 that is evicted
// first: what is read once would drive out all else. Before compute capability 9.0, where nobody
// has measured it, a plain copy.
__device__ __forceinline__ void cp_async_once(SmemAddress dst, const void* gmem, bool valid) {
#if __CUDA_ARCH__ >= 900
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const int src_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst),
               "l"(gmem), "r"(src_bytes), "l"(policy)
               : "memory");
#else
  cp_async<16>(dst, gmem, valid);
#endif
}

}  // namespace dlattn::ptx
