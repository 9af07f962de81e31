#pragma once

#include <cstdint>

#include "cuda/plan/tile_config.h"
#include "cuda/tile/accumulation_limits.h"

namespace dlattn::wmma_qk {

constexpr int kBlockM = 64;
constexpr int kBlockN = 32;
constexpr int kNumWarps = kBlockM / 16;  // one row group of exactly 16 rows per warp

constexpr int kElementBytes = 2;  // float16 and bfloat16

// Padding keeps rows 16-byte aligned, as wmma's leading dimensions must be, and spreads them over
// the banks.
constexpr int kPad = 8;                // elements, of sQ, sK and sV
constexpr int kScoreLd = kBlockN + 8;  // floats from row to row of sS

constexpr int row_elements(int head_dim_tile) {
  return head_dim_tile + kPad;
}

// Byte offsets into dynamic shared memory. Every 16 x 16 operand in it starts at a multiple of 32
// bytes, as wmma requires. The totals of rows of many keys follow (tile/totals.cuh).
struct SmemMap {
  int q;  // [kBlockM][row_elements]
  int k;  // [kBlockN][row_elements]
  int v;  // [kBlockN][row_elements]
  int s;  // fp32 [kBlockM][kScoreLd]: scores, then probabilities
  int total;
};

constexpr SmemMap smem_map(int head_dim_tile) {
  const int row_bytes = row_elements(head_dim_tile) * kElementBytes;
  SmemMap map{};
  map.q = 0;
  map.k = map.q + kBlockM * row_bytes;
  map.v = map.k + kBlockN * row_bytes;
  map.s = map.v + kBlockN * row_bytes;
  map.total = map.s + kBlockM * kScoreLd * static_cast<int>(sizeof(float));
  return map;
}

constexpr TileConfig tile_config(int head_dim_tile, std::int64_t seqlen_k = 0) {
  return {kBlockM, kBlockN, kNumWarps, 1,
          smem_map(head_dim_tile).total +
              tile::totals_bytes(kElementBytes, seqlen_k, kBlockM, head_dim_tile)};
}

}  // namespace dlattn::wmma_qk
