#pragma once

namespace dlattn::ptx {

// PTX ISA, "Special Registers: %ctaid". blockIdx.x, read anew: what is worked out from it is not
// taken for the same as what was worked out before, and so not kept in registers in between.
__device__ __forceinline__ unsigned reread_block_index() {
  unsigned x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// PTX ISA, "Special Registers: %tid". threadIdx.x, likewise.
__device__ __forceinline__ unsigned reread_thread_index() {
  unsigned x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// x, taken for another number, for the same reason.
__device__ __forceinline__ unsigned reread(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float reread(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// PTX ISA, "bar.warp.sync". No load behind it is scheduled ahead of it, as many would be where
// their registers do not suffice. The warp's lanes pass it together; nothing else is meant by it.
__device__ __forceinline__ void fence_loads() {
  __syncwarp();
}

}  // namespace dlattn::ptx
