#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/smem.cuh"
#include "harness/block.h"

// ldmatrix: each lane plainly reads the row that it names, then the warp exchanges elements, which
// orders no memory.
namespace dlattn::ptx {

namespace model {

inline void ldmatrix(std::uint32_t (&r)[4], SmemAddress row, simt::Combine combine) {
  if (row % 16 != 0) simt::die("ldmatrix at %u, which is not a multiple of 16 bytes", row);
  simt::MatrixRow operand;
  for (int half = 0; half < 2; ++half)
    std::memcpy(&operand.row[half], at_smem_address(row) + 8 * half, 8);
  simt::warp_collective("ldmatrix", 0xFFFFFFFFu, combine, &operand);
  std::memcpy(r, operand.registers, sizeof r);
}

}  // namespace model

inline void ldmatrix_x4(std::uint32_t (&r)[4], SmemAddress row) {
  model::ldmatrix(r, row, simt::combine_ldmatrix);
}

inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], SmemAddress row) {
  model::ldmatrix(r, row, simt::combine_ldmatrix_trans);
}

}  // namespace dlattn::ptx
