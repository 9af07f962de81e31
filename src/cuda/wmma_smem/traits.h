#pragma once

#include "cuda/tile/config.h"

namespace dlattn::wmma_smem {

constexpr int kBlockM = 64;
constexpr int kBlockN = 32;
constexpr int kNumWarps = kBlockM / 16;  // one exact 16-row stripe per warp
constexpr int kNumStages = 2;

constexpr int kPad = 8;       // elements: rows stay 16-byte aligned and ldmatrix rows spread over the banks
constexpr int kScorePad = 4;  // floats

constexpr TileConfig tile_config(int head_dim_tile) {
  const int smem_q = kBlockM * (head_dim_tile + kPad) * 2;
  const int smem_kv = kNumStages * 2 * kBlockN * (head_dim_tile + kPad) * 2;
  const int smem_s = kBlockM * (kBlockN + kScorePad) * 4;
  const int smem_p = kBlockM * (kBlockN + kPad) * 2;
  return {kBlockM, kBlockN, kNumWarps, kNumStages, smem_q + smem_kv + smem_s + smem_p};
}

}  // namespace dlattn::wmma_smem
