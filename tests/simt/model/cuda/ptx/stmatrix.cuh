#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/smem.cuh"
#include "harness/block.h"
#include "harness/memory.h"

namespace dlattn::ptx {

// The warp exchanges elements, then each lane plainly writes the row that it names.
inline void stmatrix_x4(SmemAddress row, const std::uint32_t (&r)[4]) {
  if (row % 16 != 0) simt::die("stmatrix at %u, which is not a multiple of 16 bytes", row);
  const int lane = simt::this_thread().lane, matrix = lane / 8;
  std::uint32_t words[4];
  for (int pair = 0; pair < 2; ++pair) {
    simt::Gather registers;
    registers.value = std::uint64_t{r[2 * pair + 1]} << 32 | r[2 * pair];
    simt::warp_collective("stmatrix", 0xFFFFFFFFu, simt::combine_gather, &registers);
    for (int i = 0; i < 4 && matrix / 2 == pair; ++i)
      words[i] = static_cast<std::uint32_t>(registers.all[lane % 8 * 4 + i] >> matrix % 2 * 32);
  }
  simt::overwrite(at_smem_address(row), words, sizeof words, 0);
}

// Row r of a matrix is what the lanes have in column r: lane 4 c + r / 2 has it of column c.
inline void stmatrix_x4_trans(SmemAddress row, const std::uint32_t (&r)[4]) {
  if (row % 16 != 0) simt::die("stmatrix at %u, which is not a multiple of 16 bytes", row);
  const int lane = simt::this_thread().lane, matrix = lane / 8;
  std::uint32_t words[4];
  for (int pair = 0; pair < 2; ++pair) {
    simt::Gather registers;
    registers.value = std::uint64_t{r[2 * pair + 1]} << 32 | r[2 * pair];
    simt::warp_collective("stmatrix", 0xFFFFFFFFu, simt::combine_gather, &registers);
    for (int i = 0; i < 4 && matrix / 2 == pair; ++i) {
      const auto element = [&](int column) {
        const auto word =
            static_cast<std::uint32_t>(registers.all[column * 4 + lane % 8 / 2] >> matrix % 2 * 32);
        return lane % 2 ? word >> 16 : word & 0xFFFFu;
      };
      words[i] = element(2 * i) | element(2 * i + 1) << 16;
    }
  }
  simt::overwrite(at_smem_address(row), words, sizeof words, 0);
}

}  // namespace dlattn::ptx
