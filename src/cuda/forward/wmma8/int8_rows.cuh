#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/forward/wmma8/int8_query.cuh"
#include "cuda/forward/wmma8/int8_softmax.cuh"
#include "cuda/forward/wmma8/products.cuh"
#include "cuda/forward/wmma8/traits.h"

namespace dlattn::wmma8 {

// A warp's query rows in 8-bit integers: as E4m3Rows, but that a tile's probabilities are relative
// to the tile's own maximum, and its products with V count times a factor of the row's.
template <int kHeadDim, bool kGeneral, Precision kPrecision>
struct Int8Rows {
  static constexpr bool kHalfValues = kPrecision == Precision::kInt8Fp16;
  static constexpr TileShape kShape = tile_shape(kHeadDim);
  static constexpr int kRowTiles = 1, kRows = 16;
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kScaledKeys = quantized_block(kPrecision, kHeadDim);  // that share a scale
  static constexpr int kTilesOfScale = kScaledKeys / kBlockN;
  static constexpr bool kQueryInRegisters = kShape.query_in_registers;
  static_assert(kShape.row_tiles == kRowTiles);
  static_assert(kScaledKeys % kBlockN == 0, "keys of a tile share a scale");
  static_assert(largest_value(Precision::kInt8Fp8) * (1 << kInt8Shift) * kBlockN <= 65504.0f,
                "sums of a tile fit fp16");

  __device__ __forceinline__ static int lane_offset_v(int lane) {
    return kHalfValues ? lane_offset_half_v<kHeadDim>(lane) : wmma8::lane_offset_v<kHeadDim>(lane);
  }

  std::uint32_t rQ[kHeadDim / 32][kRowTiles][4];  // in the end if kQueryInRegisters
  float q_scale[2];  // times what products of rotated rows are divided by
  TileSoftmax<kGeneral> softmax[kRowTiles][2];
  float acc_o[kRowTiles][kHeadDim / 16][2][4] = {};

  // The warp's rows from `first_row` on, of which `seqlen_q` exist.
  __device__ __forceinline__ void load_queries(const QueryRows& rows, int first_row, int seqlen_q,
                                               int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (!kQueryInRegisters) ptx::fence_loads();
      const int row = first_row + lane / 4 + 8 * h;
      QueryRow<kHeadDim> query;
      // seed: query-exists
      query.load(rows, row, row < seqlen_q, lane);
      query.rotate(lane);
      std::uint32_t packed[kHeadDim / 16];
      q_scale[h] = query.round(packed) * static_cast<float>(kHeadDim);
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) rQ[d / 2][0][d % 2 * 2 + h] = packed[d];
    }
    if constexpr (!kQueryInRegisters) {
#pragma unroll
      for (int d = 0; d < kHeadDim / 32; ++d) memcpy(own_query(d), rQ[d], sizeof rQ[d]);
    }
  }

  // As E4m3Rows::attend.
  template <typename Consumer>
  __device__ __forceinline__ void attend(Consumer& consumer,
                                         const Int8Scores<kGeneral, kTilesOfScale>& scores,
                                         const tile::Mask& mask, ptx::SmemAddress lane_k,
                                         ptx::SmemAddress lane_v, int lane) {
    const tile::Range any = mask.any_row(0, kRows - 1);
    // after_softmax() stands once: of two copies of it the registers would not suffice.
    const bool sees = any.begin < kBlockN && any.end > 0;
    float factors[2];
    std::uint32_t rP[kRowTiles][kBlockN / (kHalfValues ? 16 : 32)][4];
    if (sees) {
      const float k_scale = scores.k_scale(consumer);
      // S = Q K^T
      float acc_s[kRowTiles][kBlockN / 8][4];
      multiply_qk(acc_s, lane_k);
      const float scales[2] = {q_scale[0] * k_scale * scores.scale,
                               q_scale[1] * k_scale * scores.scale};
      if constexpr (kGeneral) {
        scores.apply_given(acc_s, scales, mask, consumer.tile(), lane);
      } else {
        if (!tile::contains_all(mask.every_row(0, kRows - 1), 0, kBlockN))
          apply_mask(acc_s, mask, lane);
      }
      // P = 2^(S - the tile's max)
      const TileOfRow<kGeneral> tile_of[2] = {{acc_s[0], 0, kGeneral ? tile::kLog2e : scales[0]},
                                              {acc_s[0], 1, kGeneral ? tile::kLog2e : scales[1]}};
      const float tile_max[2] = {tile_of[0].max(), tile_of[1].max()};
      raise_max(tile_max);
      const float v_scale = scores.v_scale(consumer);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // In natural units, so that sums of large values are as far from overflow as they can be.
        const float weight = softmax[0][h].shifted_weight(tile_max[h]);
        const float sum = tile_of[h].probabilities(acc_s[0], h);
        softmax[0][h].row_sum = fmaf(sum, weight, softmax[0][h].row_sum);
        // seed: v-scale
        factors[h] = weight * v_scale;
      }
      if constexpr (kHalfValues)
        pack_half<kBlockN>(rP[0], acc_s[0]);
      else
        pack<kBlockN>(rP[0], acc_s[0]);
    }
    consumer.after_softmax();
    if (!sees) return;
    // O = O + factor * P V
    const auto promote = [&factors](float o, float product, int, int h) {
      // seed: promote-tile
      return fmaf(product, factors[h], o);
    };
    if constexpr (kHalfValues)
      multiply_half_pv<kHeadDim, kBlockN, !kQueryInRegisters>(acc_o, rP, lane_v, promote);
    else
      multiply_pv<kHeadDim, kBlockN, HalfSums>(acc_o, rP, lane_v, promote);
  }

 private:
  // Where this thread keeps 32 columns of its rows of Q for itself, if not in registers.
  __device__ __forceinline__ static tile::Vec<std::uint32_t, 4>* own_query(int block) {
    constexpr int kThreads = kShape.num_warps * 32;
    constexpr int kOffset = smem_map(kHeadDim, value_bytes(kPrecision)).q;
    return reinterpret_cast<tile::Vec<std::uint32_t, 4>*>(ptx::dynamic_smem() + kOffset) +
           block * kThreads + threadIdx.x;
  }

  // S as floats: sums of integers that start from the bias's bits are those of biased floats.
  __device__ __forceinline__ void multiply_qk(float (&acc_s)[kRowTiles][kBlockN / 8][4],
                                              ptx::SmemAddress lane_k) const {
    static_assert(127 * 127 * kHeadDim < 1 << 22, "sums fit beside the bias");
    std::int32_t sums[kRowTiles][kBlockN / 8][4];
    wmma8::multiply_qk<kHeadDim>(sums, kIntegerBiasBits, lane_k,
                                 [&](std::uint32_t (&a)[kRowTiles][4], int d) {
                                   if constexpr (kQueryInRegisters) {
                                     memcpy(a, rQ[d / 32], sizeof a);
                                   } else {
                                     ptx::fence_loads();
                                     memcpy(a, own_query(d / 32), sizeof a);
                                   }
                                 });
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        acc_s[0][j][e] = float_of_bits(static_cast<std::uint32_t>(sums[0][j][e]));
    }
  }

  // Raises the row max to a tile's. It rises in a few of a row's tiles, so that what was
  // accumulated before is multiplied apart.
  __device__ __forceinline__ void raise_max(const float (&tile_max)[2]) {
    const bool rises = tile_max[0] > softmax[0][0].row_max || tile_max[1] > softmax[0][1].row_max;
    if (!__any_sync(tile::kFullMask, rises)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      TileSoftmax<kGeneral>& row = softmax[0][h];
      const float old_max = row.row_max;
      row.row_max = fmaxf(old_max, tile_max[h]);
      const float factor = row.weight(old_max);
      // seed: rescale-sum
      row.row_sum *= factor;
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // seed: rescale-output
          acc_o[0][d][h][e] *= factor;
        }
      }
    }
  }
};

}  // namespace dlattn::wmma8
