#pragma once

#include "cuda/tile/config.h"

namespace dlattn::wmma_qk {

constexpr int kBlockM = 64;
constexpr int kBlockN = 64;
constexpr int kNumWarps = kBlockM / 16;  // one exact 16-row stripe per warp

constexpr int kPad = 8;       // elements: rows stay 16-byte aligned and ldmatrix rows spread over the banks
constexpr int kScorePad = 4;  // floats

constexpr TileConfig tile_config(int head_dim_tile) {
  const int smem_qkv = (kBlockM + 2 * kBlockN) * (head_dim_tile + kPad) * 2;
  const int smem_s = kBlockM * (kBlockN + kScorePad) * 4;
  return {kBlockM, kBlockN, kNumWarps, 1, smem_qkv + smem_s};
}

}  // namespace dlattn::wmma_qk
