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
    const auto box_of = [&](int i) {
      if (i >= segment.count || lane_row >= kBlockN)
        return tile::VarlenBoxes{segment.head_kv, 1, 0};
      const int key = (segment.tile + i) * kBlockN + lane_row;
      return tile::page_box_of(source, seen, segment.head_kv, lengths.seqlen_k, key, box_rows,
                               args.page_rows);
    };
    tile::VarlenBoxes box = box_of(0), next = box_of(1);
#pragma unroll 1
    for (int i = 0; i < segment.count; ++i, ++use) {
      const tile::VarlenBoxes later = box_of(i + kStages);
      prefetch(later);
#pragma unroll
      for (int c = 0; c < kConsumers; ++c) copy_columns(box, c);
      box = next, next = later;
    }
  }

  // Has the rows of a box, for which there is no stage yet, come to L2: the stages alone are too
  // little to have on its way from memory.
  __device__ __forceinline__ void prefetch(const tile::VarlenBoxes& box) const {
    if (box.length <= 0 || params.k.row_stride != params.head_dim) return;
    const auto* const row =
        static_cast<const char*>(params.k.data) +
        (std::int64_t{box.start} * params.k.row_stride + box.head * params.k.head_stride) *
            kElementBytes;
    const int rows = min(box.length, box_rows);
    ptx::prefetch_to_l2(row, rows * static_cast<int>(params.head_dim) * kElementBytes);
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
