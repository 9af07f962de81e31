#pragma once

#include "cuda/forward/wmma/traits.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/stages.cuh"

// Barriers of the pipeline: how the warps of a block hand the stages of K and V over to each other.
// Tiles are counted from 0 in the order in which they are walked. Tile i is in stage i % kStages.
namespace dlattn::wmma {

constexpr int kTileBarrier = 1;
static_assert(kMbarrierBytes == ptx::kMbarrierBytes);

// The handover of a shape in the code that is being compiled.
constexpr Handover resolved(Handover handover) {
  if (handover != Handover::kMbarrierIfSlow) return handover;
  return tile::kFastTensorCores ? Handover::kBlockBarrier : Handover::kMbarrier;
}

template <int kNumWarps, Handover kHandover, int kStages>
struct Stages;

// One barrier of the block per tile, for two stages: after it the tile has landed, and the stage of
// the tile before is free.
template <int kNumWarps>
struct Stages<kNumWarps, Handover::kBlockBarrier, 2> {
  __device__ __forceinline__ explicit Stages(ptx::SmemAddress) {}
  // All threads call it after they have started the copies of tile `i`, or stored it themselves.
  __device__ __forceinline__ void publish(int, bool = true) const { ptx::cp_async_commit(); }
  // All threads call it instead of publish() where there is no next tile.
  __device__ __forceinline__ void skip() const { ptx::cp_async_commit(); }
  static constexpr int kGroups = 1;  // commit groups of cp.async per tile
  // Waits until tile `i` has landed. kLater: this thread's commit groups that are younger.
  template <int kLater = 0>
  __device__ __forceinline__ void wait_full(int) const {
    ptx::cp_async_wait<kLater>();
    ptx::barrier_sync(kTileBarrier, kNumWarps * 32);  // warps come to it from different loops
  }
  // Waits until the stage of tile `i` may be overwritten.
  __device__ __forceinline__ void wait_empty(int) const {}
  // All lanes of a warp call it after the warp has read tile `i`.
  __device__ __forceinline__ void release(int, int) const {}
};

// An mbarrier pipeline. With two stages a warp may be ahead of the others by the better part of a
// tile, with more stages by more.
template <int kNumWarps, int kStages>
struct Stages<kNumWarps, Handover::kMbarrier, kStages> : tile::MbarrierStages<kNumWarps, kStages> {
  __device__ __forceinline__ explicit Stages(ptx::SmemAddress memory)
      : tile::MbarrierStages<kNumWarps, kStages>{memory} {
    if (threadIdx.x == 0) this->init();
    __syncthreads();
  }
  __device__ __forceinline__ void publish(unsigned i, bool copied = true) const {
    tile::MbarrierStages<kNumWarps, kStages>::publish(i, copied);
  }
  __device__ __forceinline__ void skip() const {}
  static constexpr int kGroups = 0;
  template <int kLater = 0>
  __device__ __forceinline__ void wait_full(unsigned i) const {
    tile::MbarrierStages<kNumWarps, kStages>::wait_full(i);
  }
};

}  // namespace dlattn::wmma
