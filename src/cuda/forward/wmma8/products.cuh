#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/forward/wmma8/copy.cuh"
#include "cuda/ptx/elements.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/mma8.cuh"
#include "cuda/ptx/permute.cuh"
#include "cuda/ptx/special.cuh"

// Both matrix products of a warp: kRowTiles x 16 query rows with the keys of a tile. Rows of bytes
// lie in shared memory as they do in global memory. Which lane has what, and why no shuffle is
// needed, is proved by tests/gpu/instructions_mma8.h.
namespace dlattn::wmma8 {

// The address that a lane gives ldmatrix, relative to a tile, for 32 columns from 0 on. Of Q, 16
// rows down first; of K, 16 keys across first, so that the registers of one product are neighbours.
template <int kHeadDim>
__device__ __forceinline__ int lane_offset_q(int lane) {
  return ByteRows<kHeadDim>::offset(lane % 16, lane / 16);
}
template <int kHeadDim>
__device__ __forceinline__ int lane_offset_k(int lane) {
  return ByteRows<kHeadDim>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
// The same for 32 keys and 16 columns of V.
template <int kHeadDim>
__device__ __forceinline__ int lane_offset_v(int lane) {
  return ByteRows<kHeadDim>::offset(lane, 0);
}

// From the address of chunk 0 of a row to chunk `chunk` of the row that is `rows` further, a
// multiple of 8.
template <int kHeadDim>
__device__ __forceinline__ ptx::SmemAddress chunk_of(ptx::SmemAddress address, int rows,
                                                     int chunk) {
  using Rows = ByteRows<kHeadDim>;
  return (address ^ (chunk % Rows::kChunks * 16)) + chunk / Rows::kChunks * Rows::kSegmentStep +
         rows * Rows::kRowBytes;
}

// Q as operand a: 32 columns from `column` on of the warp's rows.
template <int kHeadDim, int kRowTiles>
__device__ __forceinline__ void load_q(std::uint32_t (&rQ)[kRowTiles][4], ptx::SmemAddress lane_q,
                                       int column) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
    ptx::ldmatrix_x4(rQ[m], ByteRows<kHeadDim>::block(lane_q, 16 * m, column / 2));
}

// d += a b of elements that the accumulators tell: fp32 ones are of e4m3, integers of signed bytes.
__device__ __forceinline__ void multiply_add(float (&d)[4], const std::uint32_t (&a)[4],
                                             std::uint32_t b0, std::uint32_t b1) {
  ptx::mma_e4m3(d, a, b0, b1);
}
__device__ __forceinline__ void multiply_add(std::int32_t (&d)[4], const std::uint32_t (&a)[4],
                                             std::uint32_t b0, std::uint32_t b1) {
  ptx::mma_s8(d, a, b0, b1);
}

// S = start + Q K^T for 8 kGroups keys. `load_q_block(rQ, column)` supplies 32 columns of Q.
template <int kHeadDim, typename Accumulator, int kRowTiles, int kGroups, typename LoadQ>
__device__ __forceinline__ void multiply_qk(Accumulator (&acc_s)[kRowTiles][kGroups][4],
                                            Accumulator start, ptx::SmemAddress lane_k,
                                            LoadQ load_q_block) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_s[m][j][e] = start;
    }
  }
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 32) {
    std::uint32_t rQ[kRowTiles][4];
    load_q_block(rQ, d);
#pragma unroll
    for (int n = 0; n < 8 * kGroups; n += 16) {
      std::uint32_t rK[4];
      ptx::ldmatrix_x4(rK, ByteRows<kHeadDim>::block(lane_k, n, d / 2));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply_add(acc_s[m][n / 8], rQ[m], rK[0], rK[1]);
        multiply_add(acc_s[m][n / 8 + 1], rQ[m], rK[2], rK[3]);
      }
    }
  }
}

// Sums of P V of 16 rows and 8 columns over a tile. Element e of a lane is mma.m16n8k32's d[e].
struct FloatSums {
  float x[4] = {};

  __device__ __forceinline__ void add(const std::uint32_t (&a)[4], std::uint32_t b0,
                                      std::uint32_t b1) {
    ptx::mma_e4m3(x, a, b0, b1);
  }
  __device__ __forceinline__ float operator[](int e) const { return x[e]; }
};
// In half the registers, for operands whose sums fit fp16.
struct HalfSums {
  std::uint32_t x[2] = {};

  __device__ __forceinline__ void add(const std::uint32_t (&a)[4], std::uint32_t b0,
                                      std::uint32_t b1) {
    ptx::mma_e4m3(x, a, b0, b1);
  }
  __device__ __forceinline__ float operator[](int e) const {
    half2 pair;
    memcpy(static_cast<void*>(&pair), &x[e / 2], sizeof pair);
    return e % 2 == 0 ? __low2float(pair) : __high2float(pair);
  }
};

// O = promote(O, P V, m, h) for kKeys keys, of each element of row tile m's row h of the lane.
// Tensor cores keep 14 bits of a sum, so that of the tile's keys starts from 0 and is added in
// fp32, 16 columns at a time. A lane has columns 4 t to 4 t + 3 of them, t being lane % 4, of two
// rows.
// kFenced: no load is moved up across those of 16 columns, where registers do not suffice for more.
template <int kHeadDim, int kKeys, typename Sums, bool kFenced = false, int kRowTiles,
          typename Promote>
__device__ __forceinline__ void multiply_pv(float (&acc_o)[kRowTiles][kHeadDim / 16][2][4],
                                            const std::uint32_t (&rP)[kRowTiles][kKeys / 32][4],
                                            ptx::SmemAddress lane_v, Promote promote) {
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    Sums even[kRowTiles], odd[kRowTiles];
#pragma unroll
    for (int n = 0; n < kKeys; n += 32) {
      std::uint32_t rV[4];
      ptx::ldmatrix_x4_trans(rV, chunk_of<kHeadDim>(lane_v, n, d));
      // Columns 2 g and 2 g + 1 of the lane's keys are neighbours: even ones, then odd ones.
      // seed: key-order
      const std::uint32_t even0 = ptx::permute_bytes<0x6420>(rV[0], rV[1]);
      const std::uint32_t even1 = ptx::permute_bytes<0x6420>(rV[2], rV[3]);
      const std::uint32_t odd0 = ptx::permute_bytes<0x7531>(rV[0], rV[1]);
      const std::uint32_t odd1 = ptx::permute_bytes<0x7531>(rV[2], rV[3]);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        even[m].add(rP[m][n / 32], even0, even1);
        odd[m].add(rP[m][n / 32], odd0, odd1);
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float (&o)[4] = acc_o[m][d][h];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          o[2 * e] = promote(o[2 * e], even[m][2 * h + e], m, h);
          o[2 * e + 1] = promote(o[2 * e + 1], odd[m][2 * h + e], m, h);
        }
      }
    }
    if constexpr (kFenced) ptx::fence_loads();
  }
}

// The same of P and V in fp16, V's columns in the order of value_place(): so a lane has the same
// columns of the sums.
template <int kHeadDim>
__device__ __forceinline__ int lane_offset_half_v(int lane) {
  return ByteRows<2 * kHeadDim>::offset(lane % 16, lane / 16);
}
template <int kHeadDim, int kKeys, bool kFenced = false, int kRowTiles, typename Promote>
__device__ __forceinline__ void multiply_half_pv(
    float (&acc_o)[kRowTiles][kHeadDim / 16][2][4],
    const std::uint32_t (&rP)[kRowTiles][kKeys / 16][4], ptx::SmemAddress lane_v, Promote promote) {
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    // Columns 4 t and 4 t + 1 of the lane, then the two behind them.
    float low[kRowTiles][4] = {}, high[kRowTiles][4] = {};
#pragma unroll
    for (int n = 0; n < kKeys; n += 16) {
      std::uint32_t rV[4];
      ptx::ldmatrix_x4_trans(rV, ByteRows<2 * kHeadDim>::block(lane_v, n, 16 * d));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16<half>(low[m], rP[m][n / 16], rV[0], rV[1]);
        ptx::mma_m16n8k16<half>(high[m], rP[m][n / 16], rV[2], rV[3]);
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float (&o)[4] = acc_o[m][d][h];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          o[e] = promote(o[e], low[m][2 * h + e], m, h);
          o[e + 2] = promote(o[e + 2], high[m][2 * h + e], m, h);
        }
      }
    }
    if constexpr (kFenced) ptx::fence_loads();
  }
}

}  // namespace dlattn::wmma8
