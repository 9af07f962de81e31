#pragma once

#include <cstdint>

#include "cuda/ptx/smem.cuh"

// Asynchronous copies from global to shared memory. The copies of a thread since its last commit
// form a group; a wait covers the thread's own groups only, so other threads see the data after a
// wait by the copier and then a barrier.
namespace dlattn::ptx {

// PTX ISA, "Data Movement and Conversion Instructions: cp.async". Copies kBytes (16, 8 or 4), or
// writes kBytes of zeros where `valid` is false, without reading `gmem` then. Both addresses must
// be multiples of kBytes. 16-byte copies may bypass L1 (.cg), others pass through it (.ca).
template <int kBytes, bool kBypassL1 = kBytes == 16>
__device__ __forceinline__ void cp_async(SmemAddress dst, const void* gmem, bool valid) {
  static_assert(kBytes == 16 || !kBypassL1, "only 16-byte copies bypass L1");
  static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4, "cp.async copies 16, 8 or 4 bytes");
  const int src_bytes = valid ? kBytes : 0;
  if constexpr (kBypassL1) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(gmem),
                 "r"(src_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(gmem), "n"(kBytes),
                 "r"(src_bytes)
                 : "memory");
  }
}

template <int kBytes, bool kBypassL1 = kBytes == 16>
__device__ __forceinline__ void cp_async(void* smem, const void* gmem, bool valid) {
  cp_async<kBytes, kBypassL1>(smem_address(smem), gmem, valid);
}

// PTX ISA, "Data Movement and Conversion Instructions: prefetch". Asks for a line of 128 bytes to
// be brought to L2. It is no access: what grids ahead write to the line goes to L2 too.
__device__ __forceinline__ void prefetch_to_l2(const void* gmem) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(gmem));
}

// PTX ISA, "Data Movement and Conversion Instructions: cp.async.commit_group".
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// PTX ISA, "Data Movement and Conversion Instructions: cp.async.wait_group". Waits until at most
// kPending of the thread's latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace dlattn::ptx
