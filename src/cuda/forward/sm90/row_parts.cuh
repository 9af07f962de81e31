#pragma once

#include "cuda/forward/sm90/ping_pong.cuh"
#include "cuda/forward/sm90/softmax.cuh"
#include "cuda/forward/sm90/traits.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::sm90 {

// The meeting of two consumers that share rows, each of which has walked every other tile of keys:
// one leaves its accumulators in shared memory and the other one adds them to its own. Lanes with
// the same index have the same elements of the same rows, so each reads what its like has left.
template <int kHeadDimV>
struct RowParts {
  float* memory;  // part_bytes(kHeadDimV)
  int row_group;

  // Adds the accumulators of the consumer that hands over to the other's. Both consumers pass the
  // same two instructions: `bar.sync` promises that its threads do.
  __device__ __forceinline__ void merge(bool hands_over, Softmax& softmax, float scale,
                                        float (&acc_o)[kHeadDimV / 2]) const {
    if (hands_over) hand_over(softmax, acc_o);
    meet();  // it is there
    if (!hands_over) add(softmax, scale, acc_o);
    meet();  // it has been read
  }

 private:
  using Vector = tile::Vec<float, 4>;
  static constexpr int kVectors = kHeadDimV / 8;

  __device__ __forceinline__ void hand_over(const Softmax& softmax,
                                            const float (&acc_o)[kHeadDimV / 2]) const {
    const ThreadIndex thread;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Vector x;
#pragma unroll
      for (int e = 0; e < 4; ++e) x.x[e] = acc_o[4 * i + e];
      vector(thread.index, i) = x;
    }
    vector(thread.index, kVectors) = {{softmax.row_max_words[0], softmax.row_max_words[1],
                                       softmax.row_sum[0], softmax.row_sum[1]}};
    unscaled(thread.index) = softmax.unscaled() ? 1.0f : 0.0f;
  }

  __device__ __forceinline__ void add(Softmax& softmax, float scale,
                                      float (&acc_o)[kHeadDimV / 2]) const {
    const ThreadIndex thread;
    const Vector stats = vector(thread.index, kVectors);
    Softmax other;
    other.row_max_words[0] = stats.x[0], other.row_max_words[1] = stats.x[1];
    other.row_sum[0] = stats.x[2], other.row_sum[1] = stats.x[3];
    // seed: merge-mode
    other.set_mode(unscaled(thread.index) != 0.0f ? Softmax::kUnscaled : Softmax::kScaled);
    float factors[2], other_factors[2];
    softmax.merge(other, scale, factors, other_factors);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const Vector x = vector(thread.index, i);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& acc = acc_o[4 * i + e];
        // seed: merge-parts
        acc = fmaf(x.x[e], other_factors[e / 2], acc * factors[e / 2]);
      }
    }
  }

  // The threads' vectors side by side, so that a warp's are 512 neighbouring bytes.
  __device__ __forceinline__ Vector& vector(int thread, int i) const {
    return reinterpret_cast<Vector*>(memory)[i * kWarpgroupThreads + thread];
  }
  __device__ __forceinline__ float& unscaled(int thread) const {
    return memory[(kVectors + 1) * kWarpgroupThreads * 4 + thread];
  }
  __device__ __forceinline__ void meet() const {
    ptx::barrier_sync(kPartsBarrier + row_group, 2 * kWarpgroupThreads);
  }
};

}  // namespace dlattn::sm90
