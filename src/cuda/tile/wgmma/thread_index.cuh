#pragma once

#include "cuda/ptx/special.cuh"
#include "cuda/tile/wgmma/warpgroup.h"

namespace dlattn::tile::wgmma {

// A thread's index in its warpgroup. It is read again for each use: registers are scarce.
struct ThreadIndex {
  int index, warp, lane;

  __device__ __forceinline__ ThreadIndex()
      : index(static_cast<int>(ptx::reread_thread_index()) % kWarpgroupThreads),
        warp(index / 32),
        lane(index % 32) {}
};

}  // namespace dlattn::tile::wgmma
