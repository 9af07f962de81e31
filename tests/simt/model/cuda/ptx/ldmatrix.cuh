#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/smem.cuh"
#include "harness/block.h"

// ldmatrix: a collective of the whole warp, then plain reads of shared memory by the lanes that get
// the elements; it orders no memory.
namespace dlattn::ptx {

namespace model {

struct MatrixRows {
  simt::Gather addresses;

  explicit MatrixRows(SmemAddress own) : addresses{own, {}} {
    if (own % 16 != 0) simt::die("ldmatrix at %u, which is not a multiple of 16 bytes", own);
    simt::warp_collective("ldmatrix", 0xFFFFFFFFu, simt::combine_gather, &addresses);
  }

  std::uint16_t element(int matrix, int row, int column) const {
    const auto address = static_cast<SmemAddress>(addresses.all[8 * matrix + row]);
    std::uint16_t x;
    std::memcpy(&x, at_smem_address(address) + 2 * column, sizeof x);
    return x;
  }
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
