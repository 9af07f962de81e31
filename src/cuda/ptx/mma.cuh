#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/elements.cuh"

namespace dlattn::ptx {

// PTX ISA, "Matrix multiply-accumulate operation using mma instruction: mma.m16n8k16 with floating
// point type". d += a b of the whole warp, with fp32 accumulators; a is 16 x 16, b 16 x 8, d 16 x
// 8. Lane l has, two adjacent columns (for b: rows) a register, the lower one in the low half,
//   a: rows l / 4 (a[0], a[2]) and l / 4 + 8 (a[1], a[3]), columns 2 (l % 4) (a[0], a[1]) and 8
//      further (a[2], a[3]);
//   b: column l / 4, rows 2 (l % 4) (b0) and 8 further (b1);
//   d: rows l / 4 (d[0], d[1]) and l / 4 + 8 (d[2], d[3]), columns 2 (l % 4) and the next.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4],
                                             std::uint32_t b0, std::uint32_t b1) {
  if constexpr (std::is_same_v<T, half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>, "mma takes half or bfloat16");
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace dlattn::ptx
