#pragma once

#include "cuda/forward/sm90_latent/narrow_setup.cuh"
#include "cuda/forward/sm90_latent/producer.cuh"

namespace dlattn::sm90_latent {

// The ring's slots, as a Producer fills them.
template <int kRows>
struct NarrowStages {
  const Ring<kRows> ring;
  typename Ring<kRows>::Place at{};

  __device__ __forceinline__ void copy(const DecodeShape&, const KernelArgs& args,
                                       const LaneBox& box) {
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      if (threadIdx.x % 32 == 0) {
        ring.wait_empty(at);
        ptx::mbarrier_arrive_expect_tx(ring.full(at.slot), kBlockBytes);
      }
      __syncwarp();  // it is free, and its barrier expects the boxes
      if (box.exists()) {
        box.box.load(ring.keys(at) + box.row * kBlockRowBytes, args.k, ring.full(at.slot),
                     block * kBlockColumns, 0);
      }
      at.advance();
    }
  }
};

}  // namespace dlattn::sm90_latent
