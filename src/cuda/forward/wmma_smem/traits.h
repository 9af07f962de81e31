#pragma once

#include "cuda/plan/tile_config.h"

namespace dlattn::wmma_smem {

constexpr int kBlockM = 64;
constexpr int kBlockN = 32;
constexpr int kNumWarps = kBlockM / 16;  // one row group of exactly 16 rows per warp
constexpr int kNumStages = 2;

constexpr int kElementBytes = 2;  // float16 and bfloat16

// Padding keeps rows 16-byte aligned, as wmma's leading dimensions must be, and spreads them over
// the banks.
constexpr int kPad = 8;                // elements, of sQ, sK and sV
constexpr int kScoreLd = kBlockN + 8;  // floats from row to row of sS

// Probabilities take the first half of each row of scores, the second is free for rescale factors.
constexpr int kProbLd = 2 * kScoreLd;       // elements
constexpr int kFactorColumn = kBlockN / 2;  // floats

constexpr int row_elements(int head_dim_tile) {
  return head_dim_tile + kPad;
}

// Byte offsets into dynamic shared memory. Every 16 x 16 operand in it starts at a multiple of 32
// bytes, as wmma requires.
struct SmemMap {
  int k;      // [kBlockN][row_elements] of stage 0; stage i is i * stage bytes further
  int v;      // [kBlockN][row_elements] of stage 0
  int stage;  // bytes from stage to stage
  int q;      // [kBlockM][row_elements], in the last stage until it is in registers
  int s;      // fp32 [kBlockM][kScoreLd]: scores, then probabilities; at the end the output
  int total;
};

constexpr SmemMap smem_map(int head_dim_tile) {
  const int row_bytes = row_elements(head_dim_tile) * kElementBytes;
  SmemMap map{};
  map.k = 0;
  map.v = map.k + kBlockN * row_bytes;
  map.stage = 2 * kBlockN * row_bytes;
  map.q = (kNumStages - 1) * map.stage;
  map.s = kNumStages * map.stage;
  map.total = map.s + kBlockM * kScoreLd * static_cast<int>(sizeof(float));
  return map;
}
static_assert(kBlockM <= 2 * kBlockN, "Q fits a stage");

constexpr TileConfig tile_config(int head_dim_tile) {
  return {kBlockM, kBlockN, kNumWarps, kNumStages, smem_map(head_dim_tile).total};
}

}  // namespace dlattn::wmma_smem
