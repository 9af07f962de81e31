#pragma once

#include "cuda/ptx/elements.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/byte_factors.cuh"
#include "cuda/tile/swizzle.cuh"

// The products of 16 query rows with keys and values of 8 bits, which become fp16 in registers:
// every int8 and e4m3 is one exactly. Rows of K and V lie in shared memory as rows of half as many
// 16-bit elements, and ldmatrix hands out two bytes where it would an element.
namespace dlattn::decode {

using tile::Unpack;

// S = Q K^T. A lane gets four neighbouring bytes of a key for each 16 columns, where operand b has
// columns 2 c, 2 c + 1, 8 + 2 c and 9 + 2 c of lane c of a quad; so Q's columns stand in the order
// of ByteQueries. `sK`: the slice at the lane's place across.
template <typename Byte, int kHeadDim, int kKeys, typename LoadQ>
__device__ __forceinline__ void multiply_qk_bytes(float (&acc_s)[1][kKeys / 8][4],
                                                  ptx::SmemAddress sK, LoadQ load_q_block) {
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) acc_s[0][j][e] = 0.0f;
  }
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 32) {
    std::uint32_t rQ[2][1][4];
    load_q_block(rQ[0], d);
    load_q_block(rQ[1], d + 16);
#pragma unroll
    for (int n = 0; n < kKeys; n += 16) {
      std::uint32_t rK[4];  // keys n and on, columns d and d + 16; keys n + 8 and on, the same
      ptx::ldmatrix_x4(rK, tile::SwizzledRows<kHeadDim / 2>::block(sK, n, d / 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint32_t low, high;
        Unpack<Byte>::halves(rK[i], &low, &high);
        ptx::mma_m16n8k16<__half>(acc_s[0][(n + i / 2 * 8) / 8], rQ[i % 2][0], low, high);
      }
    }
  }
}

// O += P V. Transposed, a lane gets two neighbouring columns of two keys, and each becomes its part
// of an operand b: of 16 columns the even ones are one product's, and the odd ones the next one's.
// `sV`: the slice at the lane's place down.
template <typename Byte, int kHeadDim, int kKeys>
__device__ __forceinline__ void multiply_pv_bytes(float (&acc_o)[1][kHeadDim / 8][4],
                                                  const std::uint32_t (&rP)[1][kKeys / 16][4],
                                                  ptx::SmemAddress sV) {
#pragma unroll
  for (int n = 0; n < kKeys; n += 16) {
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 32) {
      std::uint32_t rV[4];  // columns d and on, keys n and n + 8; columns d + 16 and on, the same
      ptx::ldmatrix_x4_trans(rV, tile::SwizzledRows<kHeadDim / 2>::block(sV, n, d / 2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t even[2], odd[2];
        Unpack<Byte>::alternating(rV[2 * half], &even[0], &odd[0]);
        Unpack<Byte>::alternating(rV[2 * half + 1], &even[1], &odd[1]);
        const int block = d / 8 + 2 * half;
        ptx::mma_m16n8k16<__half>(acc_o[0][block], rP[0][n / 16], even[0], even[1]);
        ptx::mma_m16n8k16<__half>(acc_o[0][block + 1], rP[0][n / 16], odd[0], odd[1]);
      }
    }
  }
}

}  // namespace dlattn::decode
