#pragma once

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/span.h"

// What rows of many keys have come to in the runs before (span.h), in kernels whose P V runs on
// CUDA cores. Without it every key is one more addition to the same accumulator, and where all of
// them are rounded the same way a million keys lose up to 1%; with it no sum of theirs has more
// than 1,024 terms.
namespace dlattn::tile {

// Those of a warp's accumulators. Each lane has its own, 32 floats apart: none waits for another.
template <int kRows, int kChunks, int kRun>
class Totals {
 public:
  // `memory`: kRows * kChunks * kRun * 32 floats of the warp's.
  __device__ __forceinline__ Totals(float* memory, int lane) : lane_(memory + lane) {}

  __device__ __forceinline__ void clear() const {
    for (int i = 0; i < kRows * kChunks * kRun; ++i) lane_[i * 32] = 0.0f;
  }

  // Adds what one run came to, in units in which the totals must be multiplied with factor(row).
  // The accumulators are 0 then.
  template <typename Factor>
  __device__ __forceinline__ void add(float (&acc)[kRows][kChunks][kRun], Factor factor) const {
    float* place = lane_;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float row_factor = factor(r);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int e = 0; e < kRun; ++e, place += 32) {
          *place = *place * row_factor + acc[r][c][e];
          acc[r][c][e] = 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ void take(float (&acc)[kRows][kChunks][kRun]) const {
    const float* place = lane_;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int e = 0; e < kRun; ++e, place += 32) acc[r][c][e] = *place;
      }
    }
  }

 private:
  float* const lane_;
};

}  // namespace dlattn::tile
