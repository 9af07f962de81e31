#pragma once

namespace dlattn::ptx {

// PTX ISA, "Parallel Synchronization and Communication Instructions: red". Adds `x` to a number in
// global memory; threads of all blocks may add to the same one, in any order.
__device__ __forceinline__ void reduce_add(float* to, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

}  // namespace dlattn::ptx
