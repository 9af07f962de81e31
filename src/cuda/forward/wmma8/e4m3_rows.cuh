#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/forward/wmma8/products.cuh"
#include "cuda/forward/wmma8/softmax.cuh"
#include "cuda/forward/wmma8/traits.h"

namespace dlattn::wmma8 {

// A warp's query rows of e4m3: Q, the softmax of each row and the unnormalised output, and how a
// tile of keys updates them. They are no members of the consumer, whose scalars nvcc could not keep
// in registers beside arrays.
template <int kHeadDim, bool kGeneral>
struct E4m3Rows {
  static constexpr TileShape kShape = tile_shape(kHeadDim);
  static constexpr int kRowTiles = kShape.row_tiles;
  static constexpr int kRows = kRowTiles * 16;
  static constexpr int kBytes = kRows * kHeadDim;  // Q's
  static constexpr int kBlockN = kShape.block_n;

  static constexpr bool kQueryInRegisters = kShape.query_in_registers;

  __device__ __forceinline__ static int lane_offset_v(int lane) {
    return wmma8::lane_offset_v<kHeadDim>(lane);
  }

  std::uint32_t rQ[kHeadDim / 32][kRowTiles][4];  // if kQueryInRegisters
  tile::OnlineSoftmax softmax[kRowTiles][2];      // of this lane's rows; row_sum is its part
  float acc_o[kRowTiles][kHeadDim / 16][2][4] = {};

  // `sQ`: where the block's rows of Q are, if kQueryInRegisters.
  __device__ __forceinline__ void load_queries(ptx::SmemAddress sQ) {
    if constexpr (kQueryInRegisters) {
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 32) load_q<kHeadDim>(rQ[d / 32], lane_q(sQ), d);
    }
  }

  // Updates the rows with a tile of keys, whose K and V begin at lane_k and lane_v for this lane's
  // ldmatrix. `mask` counts rows from the warp's first and keys from the tile's. Calls
  // consumer.after_softmax() once.
  template <typename Consumer, typename Scores>
  __device__ __forceinline__ void attend(Consumer& consumer, const Scores& scale,
                                         const tile::Mask& mask, ptx::SmemAddress lane_k,
                                         ptx::SmemAddress lane_v, int lane) {
    const tile::Range any = mask.any_row(0, kRows - 1);
    if (any.begin >= kBlockN || any.end <= 0) return consumer.after_softmax();
    // S = Q K^T
    const ptx::SmemAddress smem = ptx::smem_address(ptx::dynamic_smem());
    float acc_s[kRowTiles][kBlockN / 8][4];
    multiply_qk<kHeadDim>(acc_s, 0.0f, lane_k, [&](std::uint32_t (&a)[kRowTiles][4], int d) {
      if constexpr (kQueryInRegisters) {
        memcpy(a, rQ[d / 32], sizeof a);
      } else {
        load_q<kHeadDim>(a, lane_q(smem + smem_map(kHeadDim).q), d);
      }
    });
    if constexpr (kGeneral) {
      scale.apply(acc_s, mask, consumer.tile(), lane);
    } else if (!tile::contains_all(mask.every_row(0, kRows - 1), 0, kBlockN)) {
      apply_mask(acc_s, mask, lane);
    }
    // P = 2^(S - row max)
    float factors[kRowTiles][2];
    std::uint32_t rP[kRowTiles][kBlockN / 32][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        factors[m][h] = tile::probabilities(softmax[m][h], acc_s[m], h, scale.log2());
      pack<kBlockN>(rP[m], acc_s[m]);
    }
    consumer.after_softmax();
    // O = O * factor + P V
    multiply_pv<kHeadDim, kBlockN, FloatSums, kGeneral && !kQueryInRegisters>(
        acc_o, rP, lane_v, [&factors](float o, float product, int m, int h) {
          // seed: promote
          return fmaf(o, factors[m][h], product);
        });
  }

 private:
  // Where the warp's rows of the block's begin for this lane's ldmatrix.
  __device__ __forceinline__ static ptx::SmemAddress lane_q(ptx::SmemAddress sQ) {
    return sQ + static_cast<int>(threadIdx.x) / 32 * kBytes +
           lane_offset_q<kHeadDim>(threadIdx.x % 32);
  }
};

}  // namespace dlattn::wmma8
