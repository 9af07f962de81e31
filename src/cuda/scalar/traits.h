#pragma once

#include "cuda/tile/config.h"

namespace dlattn::scalar {

// Keys per tile = lanes of a warp: a lane owns one key's score.
constexpr int kBlockN = 32;
constexpr int kNumWarps = 4;

// Rows are padded by 16 bytes so that 32 lanes reading one column of K hit different banks.
constexpr int row_bytes(int element_bytes, int head_dim_tile) { return head_dim_tile * element_bytes + 16; }

constexpr TileConfig tile_config(int element_bytes, int head_dim_tile) {
  const int block_m = head_dim_tile * element_bytes > 512 ? 16 : 32;
  const int rows = block_m + 2 * kBlockN;                    // sQ, sK, sV
  const int smem_p = block_m * kBlockN * 4;                  // sP, fp32
  return {block_m, kBlockN, kNumWarps, 1, rows * row_bytes(element_bytes, head_dim_tile) + smem_p};
}

}  // namespace dlattn::scalar
