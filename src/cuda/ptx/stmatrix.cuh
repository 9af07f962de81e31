#pragma once

#include <cstdint>

#include "cuda/ptx/smem.cuh"

namespace dlattn::ptx {

// PTX ISA, "Warp-level matrix store instruction: stmatrix". The reverse of ldmatrix_x4: lane l
// gives the address of row l % 8 of matrix l / 8, a multiple of 16 bytes, and in r[i], of matrix i,
// row l / 4, columns 2 (l % 4) and the next.
__device__ __forceinline__ void stmatrix_x4(SmemAddress row, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// The same with each matrix transposed: r[i] has, of matrix i, column l / 4, rows 2 (l % 4) and the
// next.
__device__ __forceinline__ void stmatrix_x4_trans(SmemAddress row, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace dlattn::ptx
