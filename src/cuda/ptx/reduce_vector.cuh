#pragma once

#include <cstdint>

#include "cuda/ptx/elements.cuh"

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

// The same section, with .v4 of packed pairs. Adds to eight neighbouring 16-bit numbers at a
// multiple of 16 bytes, and rounds to nearest, where no other thread does meanwhile.
__device__ __forceinline__ void reduce_add_alone(half* to, const std::uint32_t (&pairs)[4]) {
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}
__device__ __forceinline__ void reduce_add_alone(__nv_bfloat16* to,
                                                 const std::uint32_t (&pairs)[4]) {
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

}  // namespace dlattn::ptx
