#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/mma/softmax.cuh"
#include "cuda/tile/swizzle.cuh"

// Both matrix products of a warp: kRowTiles x 16 query rows with the keys of a tile.
namespace dlattn::tile::mma {

// The address that a lane gives ldmatrix, relative to a tile, for the block of columns 0 .. 15.
// kBoxRows here and below: see tile::SwizzledRows.
//
// For Q (operand a) and V (operand b after a transposition): the four matrices are the quadrants of
// a 16 x 16 block, down the rows first.
template <int kColumns, int kBoxRows = 0>
__device__ __forceinline__ int lane_offset_down(int lane) {
  return tile::SwizzledRows<kColumns, kBoxRows>::offset(lane % 16, lane / 16);
}
// For K (operand b as it lies): across the columns first, so that the two registers of one product
// are neighbours, as the instruction wants them: otherwise each costs moves.
template <int kColumns, int kBoxRows = 0>
__device__ __forceinline__ int lane_offset_across(int lane) {
  return tile::SwizzledRows<kColumns, kBoxRows>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Columns `column` .. `column` + 15 of the warp's rows of Q, from its lane's address.
template <int kHeadDim, int kBoxRows = 0, int kRowTiles>
__device__ __forceinline__ void load_q(std::uint32_t (&rQ)[kRowTiles][4], ptx::SmemAddress sQ,
                                       int column) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
    ptx::ldmatrix_x4(rQ[m], tile::SwizzledRows<kHeadDim, kBoxRows>::block(sQ, m * 16, column));
}

// S = Q K^T for kKeys keys from row kFirst of the tile on. `load_q_block(rQ, column)` supplies 16
// columns of Q.
template <typename T, int kHeadDim, int kFirst, int kKeys, int kBoxRows = 0, int kRowTiles,
          int kGroups, typename LoadQ>
__device__ __forceinline__ void multiply_qk(float (&acc_s)[kRowTiles][kGroups][4],
                                            ptx::SmemAddress sK, LoadQ load_q_block) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int j = kFirst / 8; j < (kFirst + kKeys) / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_s[m][j][e] = 0.0f;
    }
  }
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16) {
    std::uint32_t rQ[kRowTiles][4];
    load_q_block(rQ, d);
#pragma unroll
    for (int n = kFirst; n < kFirst + kKeys; n += 16) {
      std::uint32_t rK[4];
      ptx::ldmatrix_x4(rK, tile::SwizzledRows<kHeadDim, kBoxRows>::block(sK, n, d));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16<T>(acc_s[m][n / 8], rQ[m], rK[0], rK[1]);
        ptx::mma_m16n8k16<T>(acc_s[m][n / 8 + 1], rQ[m], rK[2], rK[3]);
      }
    }
  }
}

// O += P V for kKeys keys from row kFirst of the tile on.
template <typename T, int kHeadDim, int kFirst, int kKeys, int kBoxRows = 0, int kRowTiles>
__device__ __forceinline__ void multiply_pv(float (&acc_o)[kRowTiles][kHeadDim / 8][4],
                                            const std::uint32_t (&rP)[kRowTiles][kKeys / 16][4],
                                            ptx::SmemAddress sV) {
#pragma unroll
  for (int n = 0; n < kKeys; n += 16) {
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      std::uint32_t rV[4];
      ptx::ldmatrix_x4_trans(rV, tile::SwizzledRows<kHeadDim, kBoxRows>::block(sV, kFirst + n, d));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16<T>(acc_o[m][d / 8], rP[m][n / 16], rV[0], rV[1]);
        ptx::mma_m16n8k16<T>(acc_o[m][d / 8 + 1], rP[m][n / 16], rV[2], rV[3]);
      }
    }
  }
}

}  // namespace dlattn::tile::mma
