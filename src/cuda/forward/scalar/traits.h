#pragma once

#include <cstdint>

#include "cuda/plan/tile_config.h"
#include "cuda/tile/accumulation_limits.h"

namespace dlattn::scalar {

// Keys per tile = lanes of a warp: a lane owns one key's scores.
constexpr int kBlockN = 32;
constexpr int kNumWarps = 4;

// With 32 rows, heads of 256 would neither fit 99 KB in fp32 nor leave registers to spare.
constexpr int block_m(int head_dim_tile) {
  return head_dim_tile > 128 ? 16 : 32;
}

// Elements from row to row of sK and sV: 16 bytes of padding, so that 32 lanes that read a column
// of K, 16 bytes each, hit different banks.
constexpr int row_elements(int element_bytes, int head_dim_tile) {
  return head_dim_tile + 16 / element_bytes;
}

// Byte offsets into dynamic shared memory. The totals of rows of many keys follow
// (tile/totals.cuh).
struct SmemMap {
  int q;  // fp32 [block_m][head_dim_tile]
  int k;  // [kBlockN][row_elements]
  int v;  // [kBlockN][row_elements]
  int p;  // fp32 [block_m][kBlockN]
  int total;
};

constexpr SmemMap smem_map(int element_bytes, int head_dim_tile) {
  const int rows = block_m(head_dim_tile);
  const int kv_bytes = kBlockN * row_elements(element_bytes, head_dim_tile) * element_bytes;
  SmemMap map{};
  map.q = 0;
  map.k = map.q + rows * head_dim_tile * static_cast<int>(sizeof(float));
  map.v = map.k + kv_bytes;
  map.p = map.v + kv_bytes;
  map.total = map.p + rows * kBlockN * static_cast<int>(sizeof(float));
  return map;
}

constexpr TileConfig tile_config(int element_bytes, int head_dim_tile, std::int64_t seqlen_k = 0) {
  const int rows = block_m(head_dim_tile);
  return {rows, kBlockN, kNumWarps, 1,
          smem_map(element_bytes, head_dim_tile).total +
              tile::totals_bytes(element_bytes, seqlen_k, rows, head_dim_tile)};
}

}  // namespace dlattn::scalar
