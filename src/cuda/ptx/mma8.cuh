#pragma once

#include <cstdint>

namespace dlattn::ptx {

// PTX ISA, "Matrix multiply-accumulate operation using mma instruction: mma.m16n8k32". d += a b of
// the whole warp; a is 16 x 32, b 32 x 8, d 16 x 8. Lane l has, four adjacent columns (for b: rows)
// of 8 bits a register, the first one in the lowest byte,
//   a: rows l / 4 (a[0], a[2]) and l / 4 + 8 (a[1], a[3]), columns 4 (l % 4) (a[0], a[1]) and 16
//      further (a[2], a[3]);
//   b: column l / 4, rows 4 (l % 4) (b0) and 16 further (b1);
//   d: rows l / 4 (d[0], d[1]) and l / 4 + 8 (d[2], d[3]), columns 2 (l % 4) and the next.

// Multiplies e4m3, with fp32 accumulators, of which compute capability 8.9 keeps 14 bits: sums of
// many products must be promoted. From 8.9 on; 9.0 computes it by instructions for float16.
__device__ __forceinline__ void mma_e4m3(float (&d)[4], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// With fp16 accumulators, to which sums are rounded: d[0] has this lane's two columns of row l / 4,
// d[1] those of row l / 4 + 8. GeForce has these at twice the rate of fp32 ones.
__device__ __forceinline__ void mma_e4m3(std::uint32_t (&d)[2], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, "
      "{%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Multiplies signed bytes; exact.
__device__ __forceinline__ void mma_s8(std::int32_t (&d)[4], const std::uint32_t (&a)[4],
                                       std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace dlattn::ptx
