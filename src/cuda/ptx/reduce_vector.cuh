#pragma once

namespace dlattn::ptx {

struct alignas(16) Float4 {
  float x[4];
};

// PTX ISA, "Parallel Synchronization and Communication Instructions: red", with .v4, for compute
// capability 9.0 and later. Adds to four neighbouring numbers in global memory, each by itself, at
// a multiple of 16 bytes; threads of all blocks may add to the same ones, in any order.
__device__ __forceinline__ void reduce_add(float* to, const Float4& x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x[0]),
               "f"(x.x[1]), "f"(x.x[2]), "f"(x.x[3])
               : "memory");
}

// The same, where barriers see to it that no other thread adds to these numbers meanwhile.
__device__ __forceinline__ void reduce_add_alone(float* to, const Float4& x) {
  reduce_add(to, x);
}

}  // namespace dlattn::ptx
