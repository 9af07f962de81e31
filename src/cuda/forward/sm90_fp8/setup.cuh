#pragma once

#include <type_traits>

#include "cuda/forward/sm90_fp8/boxes.h"
#include "cuda/forward/sm90_fp8/traits.h"
#include "cuda/ptx/tensor_map.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/varlen_scheduler.cuh"
#include "cuda/tile/wgmma/mask.cuh"
#include "cuda/tile/wgmma/thread_index.cuh"

// Shared by producer and consumers: tensor maps, shared memory and the barriers between them.
namespace dlattn::sm90_fp8 {

using tile::wgmma::ThreadIndex;

// The work tiles of a block. Of a persistent one under causality few come by twos, the longest that
// is left of a head and the shortest, so that shares are equal.
struct WorkTiles {
  const LaunchShape& shape;
  const unsigned& count;

  __device__ __forceinline__ unsigned index(unsigned round) const {
    // seed: by-twos
    if (by_twos()) return (round & ~1u) * gridDim.x + 2 * blockIdx.x + (round & 1u);
    return tile::RoundRobin{shape, count}.index(round);
  }
  __device__ __forceinline__ tile::WorkTile tile(unsigned index) const {
    if (by_twos()) return tile::PairedTiles{shape, count}.tile(index);
    return tile::scheduled_tile(shape, index);
  }

 private:
  // A window makes most tiles alike.
  __device__ __forceinline__ bool by_twos() const {
    return shape.longest_first && shape.window.left == kUnlimited<int> && gridDim.x < count &&
           count <= kMostByTwos * gridDim.x;
  }
};

// The arguments that a launch passes beside the parameters.
struct KernelArgs {
  ptx::TensorMap q, k, v;
  unsigned num_work_tiles;  // of the whole problem
};

template <bool kScaled>
struct KernelArgsOf : KernelArgs {};
// The scales of 16-bit inputs that were quantised.
template <>
struct KernelArgsOf<true> : KernelArgs {
  BlockScales scales;
};

template <int kHeadDim>
struct Shared {
  static constexpr TileShape kShape = tile_shape(kHeadDim);
  static constexpr SmemMap kMap = smem_map(kHeadDim);
  static constexpr int kRowsBytes = tile_bytes(kWarpgroupRows, kHeadDim);  // a warpgroup's, of Q
  static constexpr int kQueryBytes = kShape.num_consumers * kRowsBytes;
  static constexpr int kKeyBytes = tile_bytes(kShape.block_n, kHeadDim);  // as many as V's
  static constexpr int kTransposedBytes = tile_bytes(kHeadDim, kShape.block_n);

  ptx::SmemAddress base;
  tile::Ring<kShape.query_stages> queries;
  tile::Ring<kShape.key_stages> keys;
  tile::Ring<kShape.value_stages> values;
  tile::Ring<kShape.transposed_stages> transposed;

  __device__ __forceinline__ explicit Shared(ptx::SmemAddress base)
      : base(base),
        queries(base + kMap.mbarriers),
        keys(base + kMap.mbarriers + queries.kBytes),
        values(base + kMap.mbarriers + queries.kBytes + keys.kBytes),
        transposed(base + kMap.mbarriers + queries.kBytes + keys.kBytes + values.kBytes) {}

  __device__ __forceinline__ ptx::SmemAddress q(unsigned use, int consumer) const {
    return base + kMap.q + queries.stage(use) * kQueryBytes + consumer * kRowsBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress k(unsigned use) const {
    return base + kMap.k + keys.stage(use) * kKeyBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress v(unsigned use) const {
    return base + kMap.v + values.stage(use) * kKeyBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress v_transposed(unsigned use) const {
    return base + kMap.transposed + transposed.stage(use) * kTransposedBytes;
  }

  // The work tile that Q's rows are of. With varlen alone, where the producer looks it up.
  __device__ __forceinline__ tile::SequenceTile* work_tile(unsigned use) const {
    static_assert(sizeof(tile::SequenceTile) <= kWorkTileBytes);
    return reinterpret_cast<tile::SequenceTile*>(ptx::dynamic_smem() + kMap.work_tiles +
                                                 queries.stage(use) * kWorkTileBytes);
  }

  // By all threads of the block, before anything else: stages are filled and released warp by warp.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      queries.init(kShape.num_consumers * 4);
      keys.init(kShape.num_consumers * 4);
      values.init(kTransposers);
      transposed.init(kShape.num_consumers * 4, kTransposers);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }
};

// The block's work tiles in its order, each with the tiles of keys that one of its rows sees:
// visit(work, start_k, tiles), with the first row of its sequence in K and V.
template <bool kVarlen, int kBlockM, int kBlockN, typename Visit>
__device__ __forceinline__ void for_each_work_tile(const AttentionParams& params,
                                                   const LaunchShape& shape, const KernelArgs& args,
                                                   Visit visit) {
  // Those of varlen are looked up by their number.
  using Scheduler = std::conditional_t<kVarlen, tile::RoundRobin, WorkTiles>;
  const Scheduler scheduler{shape, args.num_work_tiles};
#pragma unroll 1
  for (unsigned round = 0;; ++round) {
    const unsigned index = scheduler.index(round);
    if (index >= scheduler.count) break;
    int start_k = 0;
    tile::SequenceTile work;
    if constexpr (kVarlen) {
      work = tile::varlen_tile(params, shape, kBlockM, index, &start_k);
      if (work.seqlen_q == 0) continue;
    } else {
      work = tile::fixed_lengths(params, scheduler.tile(index));
    }
    const int m0 = work.m_block * kBlockM;
    visit(work, start_k,
          tile::wgmma::visible_tiles(tile::wgmma::position_mask(params, shape, work), m0,
                                     min(m0 + kBlockM, work.seqlen_q) - 1, kBlockN));
  }
}

}  // namespace dlattn::sm90_fp8
