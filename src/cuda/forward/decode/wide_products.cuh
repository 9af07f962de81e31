#pragma once

#include "cuda/forward/decode/byte_products.cuh"
#include "cuda/tile/key_parts/workspace.h"
#include "cuda/tile/mma/products.cuh"
#include "cuda/tile/online_softmax.cuh"

// Both products of one of the four warps that share 16 query rows with wide heads: each has some of
// the columns of Q, K, V and out.
namespace dlattn::decode {

// A warp's columns: in each segment of 64 columns of a row 16, so that where they lie differs from
// warp to warp by one XOR.
namespace warp_columns {
constexpr int kKeyBlocks = tile::key_parts::kWideTile / 64;  // blocks of 16 columns of Q and K
constexpr int kValueBlocks = tile::key_parts::kWideValues / 64;

// The first column of the warp's i-th block.
__device__ __forceinline__ int column(int warp, int i) {
  return i * 64 + warp * 16;
}
// From a lane's address of columns 0 .. 15 to that of the warp's first block. `KV`: the type of
// elements of K and V.
template <typename KV>
__device__ __forceinline__ ptx::SmemAddress first(ptx::SmemAddress address, int warp) {
  return address ^ (warp * 16 * static_cast<int>(sizeof(KV)));
}
}  // namespace warp_columns

// Q and the unnormalised output in a warp's columns. All of the warps that share the rows have the
// same softmax, to the last bit. Apart from the consumer, so that nvcc splits it into registers.
struct WideRows {
  float acc_o[warp_columns::kValueBlocks][2][4] = {};
  std::uint32_t rQ[warp_columns::kKeyBlocks][4];
  float scales[2];  // with 8-bit keys: what products of rows lane / 4 and lane / 4 + 8 count
  tile::OnlineSoftmax softmax[2];  // of the same rows; row_sum: this lane's part
};

// The scores of 16 keys that the warp's columns give. Products that follow each other have two sets
// of accumulators, so that they wait for each other half as long. `keys`: the slice.
template <typename T>
__device__ __forceinline__ void multiply_wide_qk(float (&acc_s)[2][4], const WideRows& rows,
                                                 ptx::SmemAddress keys, int lane, int warp) {
  using tile::key_parts::kWideTile;
  const ptx::SmemAddress sK =
      warp_columns::first<T>(keys + tile::mma::lane_offset_across<kWideTile>(lane), warp);
  float acc[2][2][4] = {};
#pragma unroll
  for (int i = 0; i < warp_columns::kKeyBlocks; ++i) {
    std::uint32_t rK[4];
    ptx::ldmatrix_x4(rK, sK + i * tile::SwizzledRows<kWideTile>::kSegmentBytes);
    ptx::mma_m16n8k16<T>(acc[i % 2][0], rows.rQ[i], rK[0], rK[1]);
    ptx::mma_m16n8k16<T>(acc[i % 2][1], rows.rQ[i], rK[2], rK[3]);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) acc_s[j][e] = acc[0][j][e] + acc[1][j][e];
  }
}

// O += P V of 16 keys in the warp's columns. `values`: the slice.
template <typename T>
__device__ __forceinline__ void multiply_wide_pv(WideRows& rows, const std::uint32_t (&rP)[1][1][4],
                                                 ptx::SmemAddress values, int lane, int warp) {
  using tile::key_parts::kWideTile;
  const ptx::SmemAddress sV =
      warp_columns::first<T>(values + tile::mma::lane_offset_down<kWideTile>(lane), warp);
#pragma unroll
  for (int i = 0; i < warp_columns::kValueBlocks; ++i) {
    std::uint32_t rV[4];
    ptx::ldmatrix_x4_trans(rV, sV + i * tile::SwizzledRows<kWideTile>::kSegmentBytes);
    ptx::mma_m16n8k16<T>(rows.acc_o[i][0], rP[0][0], rV[0], rV[1]);
    ptx::mma_m16n8k16<T>(rows.acc_o[i][1], rP[0][0], rV[2], rV[3]);
  }
}

// The same for 32 keys of 8 bits, as byte_products.cuh tells. A block of 16 columns is one chunk of
// 16 bytes of a row, and one ldmatrix has it of all keys, transposed or not.
using WideByteRows = tile::SwizzledRows<tile::key_parts::kWideTile / 2>;

template <typename Byte>
__device__ __forceinline__ ptx::SmemAddress wide_lane_address(ptx::SmemAddress slice, int lane,
                                                              int warp) {
  return warp_columns::first<Byte>(slice + WideByteRows::offset(lane, 0), warp);
}

template <typename Byte>
__device__ __forceinline__ void multiply_wide_qk_bytes(float (&acc_s)[4][4], const WideRows& rows,
                                                       ptx::SmemAddress keys, int lane, int warp) {
  const ptx::SmemAddress sK = wide_lane_address<Byte>(keys, lane, warp);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) acc_s[j][e] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < warp_columns::kKeyBlocks; ++i) {
    std::uint32_t rK[4];  // eight keys each
    ptx::ldmatrix_x4(rK, sK + i * WideByteRows::kSegmentBytes);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      std::uint32_t low, high;
      Unpack<Byte>::halves(rK[j], &low, &high);
      ptx::mma_m16n8k16<__half>(acc_s[j], rows.rQ[i], low, high);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) acc_s[j][e] *= rows.scales[e / 2];
  }
}

// acc_o[i][0] has the even columns of block i, acc_o[i][1] the odd ones.
template <typename Byte>
__device__ __forceinline__ void multiply_wide_pv_bytes(WideRows& rows,
                                                       const std::uint32_t (&rP)[1][2][4],
                                                       ptx::SmemAddress values, int lane,
                                                       int warp) {
  const ptx::SmemAddress sV = wide_lane_address<Byte>(values, lane, warp);
#pragma unroll
  for (int i = 0; i < warp_columns::kValueBlocks; ++i) {
    std::uint32_t rV[4];  // eight keys each
    ptx::ldmatrix_x4_trans(rV, sV + i * WideByteRows::kSegmentBytes);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      std::uint32_t even[2], odd[2];
      Unpack<Byte>::alternating(rV[2 * n], &even[0], &odd[0]);
      Unpack<Byte>::alternating(rV[2 * n + 1], &even[1], &odd[1]);
      ptx::mma_m16n8k16<__half>(rows.acc_o[i][0], rP[0][n], even[0], even[1]);
      ptx::mma_m16n8k16<__half>(rows.acc_o[i][1], rP[0][n], odd[0], odd[1]);
    }
  }
}

}  // namespace dlattn::decode
