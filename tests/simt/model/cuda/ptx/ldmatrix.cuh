#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/smem.cuh"
#include "harness/block.h"

// ldmatrix: each lane plainly reads the row that it names, then the warp exchanges elements, which
// orders no memory.
namespace dlattn::ptx {

namespace model {

class MatrixRows {
 public:
  explicit MatrixRows(SmemAddress own) {
    if (own % 16 != 0) simt::die("ldmatrix at %u, which is not a multiple of 16 bytes", own);
    for (int half = 0; half < 2; ++half) {
      std::memcpy(&halves_[half].value, at_smem_address(own) + 8 * half, 8);
      simt::warp_collective("ldmatrix", 0xFFFFFFFFu, simt::combine_gather, &halves_[half]);
    }
  }

  std::uint16_t element(int matrix, int row, int column) const {
    const std::uint64_t half = halves_[column / 4].all[8 * matrix + row];
    return static_cast<std::uint16_t>(half >> (column % 4 * 16));
  }

 private:
  simt::Gather halves_[2];
};

}  // namespace model

inline void ldmatrix_x4(std::uint32_t (&r)[4], SmemAddress row) {
  const model::MatrixRows rows(row);
  const int lane = simt::this_thread().lane;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t low = rows.element(i, lane / 4, lane % 4 * 2);
    const std::uint32_t high = rows.element(i, lane / 4, lane % 4 * 2 + 1);
    r[i] = high << 16 | low;
  }
}

inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], SmemAddress row) {
  const model::MatrixRows rows(row);
  const int lane = simt::this_thread().lane;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t low = rows.element(i, lane % 4 * 2, lane / 4);
    const std::uint32_t high = rows.element(i, lane % 4 * 2 + 1, lane / 4);
    r[i] = high << 16 | low;
  }
}

}  // namespace dlattn::ptx
