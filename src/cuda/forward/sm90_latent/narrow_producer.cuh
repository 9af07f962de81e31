#pragma once

#include "cuda/forward/sm90_latent/narrow_setup.cuh"
#include "cuda/forward/sm90_latent/producer.cuh"

namespace dlattn::sm90_latent {

// The ring's slots, as a Producer fills them.
template <int kRows>
struct NarrowStages {
  using Memory = Ring<kRows, kElementBytes>;
  static constexpr int kWarps = 1;
  const Memory ring;
  typename Memory::Place at{};

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

// The same with keys of 8 bits. To ask for a block takes a warp longer than memory takes to bring
// it, so several warps share a tile's blocks: each has every so many-th of them, waits for all of
// these, a lane each, and then asks for one behind the other.
template <int kRows>
struct ByteStages {
  using Memory = Ring<kRows, 1>;
  static constexpr int kWarps = kByteCopyWarps, kOfWarp = kBlocks / kWarps;
  static_assert(kBlocks % kWarps == 0);
  const Memory ring;
  typename Memory::Place at{};

  __device__ __forceinline__ void copy(const DecodeShape&, const KernelArgs& args,
                                       const LaneBox& box) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < kOfWarp) {
      typename Memory::Place own = at;
      own.advance(warp + lane * kWarps);
      ring.wait_empty(own);
      ptx::mbarrier_arrive_expect_tx(ring.full(own.slot), Memory::kMap.block_bytes);
    }
    __syncwarp();  // they are free, and their barriers expect the boxes
    if (box.exists()) {
      typename Memory::Place to = at;
      to.advance(warp);
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i) {
        box.box.load(ring.keys(to) + box.row * kBlockColumns, args.k, ring.full(to.slot),
                     (warp + i * kWarps) * kBlockColumns, 0);
        to.advance(kWarps);
      }
    }
    at.advance(kBlocks);
  }
};

}  // namespace dlattn::sm90_latent
