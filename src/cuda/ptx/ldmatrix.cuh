#pragma once

#include <cstdint>

#include "cuda/ptx/smem.cuh"

namespace dlattn::ptx {

// PTX ISA, "Warp-level matrix load instruction: ldmatrix". Four 8 x 8 matrices of 16-bit elements.
// Lane l gives the address of row l % 8 of matrix l / 8, a multiple of 16 bytes; r[i] gets, of
// matrix i, row l / 4, columns 2 (l % 4) and the next.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&r)[4], SmemAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// The same with each matrix transposed: r[i] gets column l / 4, rows 2 (l % 4) and the next.
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&r)[4], SmemAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

}  // namespace dlattn::ptx
