#pragma once

#include "cuda/backward/wmma/traits.h"
#include "cuda/ptx/reduce.cuh"
#include "cuda/ptx/reduce_vector.cuh"
#include "cuda/tile/vec.cuh"

// The sum of dQ in global memory: in which order a part has the accumulators of its warp.
namespace dlattn::backward_wmma {

// Whether a lane adds four of its accumulators by one instruction, which there is from compute
// capability 9.0 on: then they are neighbours. Else the lanes' are, so that one instruction of a
// warp adds to 128 bytes in a row. DLATTN_FAST_TENSOR_CORES is for tests (tile/stages.cuh).
#if defined(__CUDA_ARCH__)
constexpr bool kAddsFour = __CUDA_ARCH__ >= 900;
#elif defined(DLATTN_FAST_TENSOR_CORES)
constexpr bool kAddsFour = true;
#else
constexpr bool kAddsFour = false;
#endif
constexpr int kLaneNumbers = kPartSize / 32;

// Adds a warp's accumulators to a part.
__device__ __forceinline__ void add_to_sum(float* part, int lane,
                                           const float (&dq)[kLaneNumbers / 4][4]) {
#pragma unroll
  for (int i = 0; i < kLaneNumbers / 4; ++i) {
    if constexpr (kAddsFour) {
      ptx::reduce_add(part + 128 * i + 4 * lane, {dq[i][0], dq[i][1], dq[i][2], dq[i][3]});
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) ptx::reduce_add(part + 128 * i + 32 * e + lane, dq[i][e]);
    }
  }
}

// A lane's accumulators of a part.
__device__ __forceinline__ void load_sum(const float* part, int lane, float (&dq)[kLaneNumbers]) {
#pragma unroll
  for (int i = 0; i < kLaneNumbers / 4; ++i) {
    if constexpr (kAddsFour) {
      float four[4];
      tile::load(four, part + 128 * i + 4 * lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[4 * i + e] = four[e];
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[4 * i + e] = part[128 * i + 32 * e + lane];
    }
  }
}

}  // namespace dlattn::backward_wmma
