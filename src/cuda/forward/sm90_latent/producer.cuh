#pragma once

#include "cuda/forward/sm90_latent/setup.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/box_source.cuh"
#include "cuda/tile/cache_source.cuh"

namespace dlattn::sm90_latent {

// A lane's box of a tile: rows of a page, from `row` of the tile on, unless it is beyond them.
struct LaneBox {
  tile::VarlenBoxes box;
  int row;

  __device__ __forceinline__ bool exists() const { return row < kBlockN; }
};

// One warp that copies all keys of the block. Each lane copies boxes of a page, which it looks up
// before it waits. Stages: where they go, a tile at a time.
template <typename Stages>
struct Producer {
  const AttentionParams& params;
  const DecodeShape& shape;
  const KernelArgs& args;
  Stages stages;
  const int box_rows = cuda::page_box_rows(params, kBlockN);

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
    // The rows of all blocks of the cluster, which copy for each other.
    const int rows = kBlockM << shape.pair_log2, first = segment.row_block * kBlockM & -rows;
    const tile::Range seen =
        lengths.mask(params, shape).any_row(first, min(first + rows, lengths.rows(shape)) - 1);
#pragma unroll 1
    for (int i = 0; i < segment.count; ++i) {
      LaneBox box{{}, static_cast<int>(threadIdx.x % 32) * box_rows};
      if (box.exists()) {
        const int key = (segment.tile + i) * kBlockN + box.row;
        box.box = tile::page_box_of(source, seen, segment.head_kv, lengths.seqlen_k, key, box_rows,
                                    args.page_rows);
      }
      stages.copy(shape, args, box);
    }
  }
};

// The two stages that consumers share.
struct WideStages {
  const Shared shared;
  unsigned use = 0;

  __device__ __forceinline__ void copy(const DecodeShape& shape, const KernelArgs& args,
                                       const LaneBox& box) {
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) copy_columns(shape, args, box, c);
    ++use;
  }

 private:
  // The columns that a consumer has freed.
  __device__ __forceinline__ void copy_columns(const DecodeShape& shape, const KernelArgs& args,
                                               const LaneBox& box, int consumer) const {
    const int owner = Shared::owner(use);
    if (threadIdx.x % 32 == 0) {
      shared.wait_empty(owner, use, consumer);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (Shared::user(owner, block) == consumer)
          ptx::mbarrier_arrive_expect_tx(shared.full(owner, block), kBlockBytes);
      }
    }
    __syncwarp();  // they are free, and their barriers expect the boxes
    if (!box.exists()) return;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (Shared::user(owner, block) == consumer) copy_block(shape, args, box, owner, block);
    }
  }

  // Where row blocks are side by side, each thread block copies every other block of columns to
  // both.
  __device__ __forceinline__ void copy_block(const DecodeShape& shape, const KernelArgs& args,
                                             const LaneBox& box, int owner, int block) const {
    const ptx::SmemAddress to = shared.block(owner, block) + box.row * kBlockRowBytes;
    if (shape.pair_log2 == 0) {
      box.box.load(to, args.k, shared.full(owner, block), block * kBlockColumns, 0);
    } else if (block % 2 == static_cast<int>(rank_in_pair(shape))) {
      box.box.load_to_pair(to, args.k, shared.full(owner, block), block * kBlockColumns, 0);
    }
  }
};

}  // namespace dlattn::sm90_latent
