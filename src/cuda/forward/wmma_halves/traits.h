#pragma once

#include "cuda/plan/tile_config.h"

namespace dlattn::wmma_halves {

constexpr int kBlockM = 64;
constexpr int kBlockN = 32;
constexpr int kHalves = 2;  // of the columns of a head: each is one warp's of a pair
constexpr int kNumWarps = kHalves * kBlockM / 16;

constexpr int kElementBytes = 2;  // float16 and bfloat16

// Heads that wmma serves are left to it: here their other half would be zeros.
constexpr int kMostOfWmma = 256;

// Byte offsets into dynamic shared memory. Q, K and V are two tiles each, one of each half of the
// columns, whose rows are tile::SwizzledRows.
struct SmemMap {
  int q;      // [kHalves][kBlockM], until it is in registers
  int k;      // [kHalves][kBlockN]
  int v;      // [kHalves][kBlockN]
  int parts;  // fp32 [kNumWarps][16][kBlockN]: each warp's part of its rows' scores
  int total;
};

constexpr SmemMap smem_map(int head_dim_tile) {
  const int row_bytes = head_dim_tile * kElementBytes;
  SmemMap map{};
  map.q = 0;
  map.k = 0;
  map.v = map.k + kBlockN * row_bytes;
  map.parts = map.v + kBlockN * row_bytes;
  map.total = map.parts + kNumWarps * 16 * kBlockN * static_cast<int>(sizeof(float));
  return map;
}
static_assert(kBlockM <= 2 * kBlockN, "Q fits where K and V will be");

constexpr TileConfig tile_config(int head_dim_tile) {
  return {kBlockM, kBlockN, kNumWarps, 1, smem_map(head_dim_tile).total};
}

}  // namespace dlattn::wmma_halves
