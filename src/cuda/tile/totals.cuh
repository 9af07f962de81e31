#pragma once

#include "cuda/tile/accumulation_limits.h"
#include "cuda/tile/online_softmax.cuh"

// Totals of rows of many keys, in kernels whose P V runs on CUDA cores. Such kernels add up the
// keys in runs (accumulation_limits.h) and add each run's accumulators to totals. Otherwise every
// key would be one more addition to the same accumulator, and where all additions are rounded the
// same way a million keys would lose up to 1%. With totals no sum has more than 1,024 addends.
namespace dlattn::tile {

// The totals of a warp's accumulators. Each lane has its own, 32 floats apart, so that no lane
// waits for another.
template <int kRows, int kChunks, int kVecSize>
class Totals {
 public:
  // `memory`: the warp's kRows * kChunks * kVecSize * 32 floats.
  __device__ __forceinline__ Totals(float* memory, int lane) : lane_(memory + lane) {}

  __device__ __forceinline__ void clear() const {
    for (int i = 0; i < kRows * kChunks * kVecSize; ++i) lane_[i * 32] = 0.0f;
  }

  // Multiplies the totals with factor(row), which makes them relative to the run's row max, adds
  // the run's accumulators, and sets these to 0.
  template <typename Factor>
  __device__ __forceinline__ void add(float (&acc)[kRows][kChunks][kVecSize], Factor factor) const {
    float* total = lane_;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float row_factor = factor(r);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int e = 0; e < kVecSize; ++e, total += 32) {
          // seed: add-run-total
          *total = *total * row_factor + acc[r][c][e];
          acc[r][c][e] = 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ void take(float (&acc)[kRows][kChunks][kVecSize]) const {
    const float* total = lane_;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int e = 0; e < kVecSize; ++e, total += 32) acc[r][c][e] = *total;
      }
    }
  }

 private:
  float* const lane_;
};

}  // namespace dlattn::tile
