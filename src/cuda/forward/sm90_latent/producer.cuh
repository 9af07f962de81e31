#pragma once

#include "cuda/forward/sm90_latent/setup.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/box_source.cuh"
#include "cuda/tile/cache_source.cuh"

namespace dlattn::sm90_latent {

// One warp that copies all keys of the block, as the columns of stages become free. Each lane
// copies boxes of a page, which it looks up before it waits.
struct Producer {
  const AttentionParams& params;
  const DecodeShape& shape;
  const KernelArgs& args;
  const Shared shared;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int box_rows = cuda::page_box_rows(params, kBlockN);
  const int lane_row = lane * box_rows;  // its box's first row of a tile, if below kBlockN
  unsigned use = 0;

  static_assert(kBlockN / 8 <= 32, "a lane for each box");

  __device__ __forceinline__ void run() {
    ptx::prefetch_tensor_map(args.k);
    Schedule units(params, shape);
    for (;;) {
      const Segment segment = units.next();
      if (segment.is_none()) break;
      copy_keys(segment);
    }
    // By the block that has least to do.
    if (!shape.whole && !shape.uniform && blockIdx.x == gridDim.x - 1) units.write_starts();
  }

 private:
  __device__ __forceinline__ void copy_keys(const Segment& segment) {
    const Lengths lengths(params, segment.sequence);
    const tile::CacheSource source(params, segment.sequence);
    const int first = segment.row_block * kBlockM;
    const tile::Range seen =
        lengths.mask(params, shape).any_row(first, min(first + kBlockM, lengths.rows(shape)) - 1);
#pragma unroll 1
    for (int i = 0; i < segment.count; ++i, ++use) {
      tile::VarlenBoxes box{};
      if (lane_row < kBlockN) {
        const int key = (segment.tile + i) * kBlockN + lane_row;
        box = tile::page_box_of(source, seen, segment.head_kv, lengths.seqlen_k, key, box_rows,
                                args.page_rows);
      }
#pragma unroll
      for (int c = 0; c < kConsumers; ++c) copy_columns(box, c);
    }
  }

  // The lane's box of the columns that a consumer has freed.
  __device__ __forceinline__ void copy_columns(const tile::VarlenBoxes& box, int consumer) const {
    const int owner = Shared::owner(use);
    if (lane == 0) {
      shared.wait_empty(owner, use, consumer);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (Shared::user(owner, block) == consumer)
          ptx::mbarrier_arrive_expect_tx(shared.full(owner, block), kBlockBytes);
      }
    }
    __syncwarp();  // they are free, and their barriers expect the boxes
    if (lane_row >= kBlockN) return;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (Shared::user(owner, block) == consumer) {
        box.load(shared.block(owner, block) + lane_row * kBlockRowBytes, args.k,
                 shared.full(owner, block), block * kBlockColumns, 0);
      }
    }
  }
};

}  // namespace dlattn::sm90_latent
