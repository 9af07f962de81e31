#pragma once

#include "cuda/forward/wmma/boxes.cuh"
#include "cuda/forward/wmma/persistent_tiles.cuh"
#include "cuda/forward/wmma/traits.h"
#include "cuda/tile/ring.cuh"

namespace dlattn::wmma {

// The shared memory of the persistent kernel and its mbarriers: of each stage of K and V a full and
// an empty one (tile::Ring), which every warp releases, and one for each warp's rows of Q.
template <typename T, int kHeadDim>
struct PersistentShared {
  static constexpr TileShape kShape = tile_shape(kHeadDim, kPersistent);
  static constexpr SmemMap kMap = smem_map(kHeadDim, kPersistent);
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kWarpRows = kShape.row_tiles * 16;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kQueryBytes = kWarpRows * kRowBytes;  // a warp's
  static constexpr int kStageBytes = kBlockN * kRowBytes;    // K's, and V's

  ptx::SmemAddress base;
  tile::Ring<kShape.stages> ring;

  __device__ __forceinline__ explicit PersistentShared(ptx::SmemAddress base)
      : base(base), ring(base + kMap.mbarriers) {}

  // The first row, in the work tile after `done` others, of those that a warp has. Under causality
  // the next work tile's groups of rows are in reversed order, so that in a head's longest and
  // shortest together all warps see as many keys.
  __device__ __forceinline__ static int warp_row(int warp, unsigned done) {
    const int group = row_group(kShape.num_warps, warp);
    return (done % 2 == 0 ? group : kShape.num_warps - 1 - group) * kWarpRows;
  }

  // By all threads of the block, before anything else.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      ring.init(kShape.num_warps);
      for (int warp = 0; warp < kShape.num_warps; ++warp)
        ptx::mbarrier_init(query_mbarrier(warp), 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }

  __device__ __forceinline__ ptx::SmemAddress q(int warp) const {
    return base + kMap.q + warp * kQueryBytes;
  }
  // The mbarrier at which a warp's rows of Q arrive; one of its threads expects their bytes there.
  __device__ __forceinline__ ptx::SmemAddress query_mbarrier(int warp) const {
    return ring.full + ring.kBytes + warp * ptx::kMbarrierBytes;
  }
};

// Where the producer is: work tile `index`, its tile `n` of keys and its last one, `begin`.
struct ProducerState {
  unsigned index;
  int n, begin;
  int head_kv, batch;
};

// The work tile of which a warp's rows are, where Q leaves no registers for it.
struct ConsumerState {
  unsigned index;
  unsigned done;  // work tiles before it
};

// The copies of the persistent kernel, by TMA. Tiles of keys are counted over all work tiles of a
// block; of every kNumWarps of them a warp's first lane starts the copy of one. Where it was last,
// it keeps in shared memory: registers are scarce.
template <typename T, int kHeadDim>
struct PersistentProducer {
  using Shared = PersistentShared<T, kHeadDim>;
  static constexpr TileShape kShape = Shared::kShape;
  using WorkTile = PersistentTile<block_m(kShape), kShape.block_n>;

  const PersistentTiles& work_tiles;
  const TensorMaps& maps;
  const Shared& shared;

  // By all warps' first lanes, before load().
  __device__ __forceinline__ void init() const {
    *state() = {work_tiles.before_first(), 0, 0, 0, 0};
  }

  // Starts the copy of this warp's rows of Q of the work tile `index`, the one after `done` others,
  // if there is such a one.
  __device__ __forceinline__ void load_queries(unsigned index, unsigned done, int warp,
                                               int lane) const {
    if (lane != 0 || index >= work_tiles.count) return;
    const tile::WorkTile work = work_tiles.tile(index);
    const ptx::SmemAddress arrived = shared.query_mbarrier(warp);
    ptx::mbarrier_arrive_expect_tx(arrived, Shared::kQueryBytes);
    load_rows<kHeadDim, Shared::kWarpRows>(
        shared.q(warp), maps.q, maps.full_segments, arrived, {work.head, work.batch},
        work.m_block * block_m(kShape) + Shared::warp_row(warp, done));
  }

  // Starts the copy of tile `i`, if it is this thread's and there is one, when its stage is empty.
  __device__ __forceinline__ void load(unsigned i) const {
    if (threadIdx.x != i % kShape.num_warps * 32) return;
    ProducerState at = *state();
    int steps = i < kShape.num_warps ? i + 1 : kShape.num_warps;
    while (steps > at.n - at.begin) {
      steps -= at.n - at.begin;
      const unsigned index = work_tiles.next(at.index);
      if (index >= work_tiles.count) return;
      at = before(index);
    }
    at.n -= steps;
    *state() = at;
    constexpr int kBlockN = kShape.block_n;
    const ptx::SmemAddress smem = ptx::smem_address(ptx::dynamic_smem());
    const ptx::SmemAddress full = shared.ring.begin_fill(i, 2 * Shared::kStageBytes);
    const int stage = i % kShape.stages * Shared::kStageBytes;
    load_rows<kHeadDim, kBlockN>(smem + Shared::kMap.k + stage, maps.k, maps.full_segments, full,
                                 {at.head_kv, at.batch}, at.n * kBlockN);
    load_rows<kHeadDim, kBlockN>(smem + Shared::kMap.v + stage, maps.v, maps.full_segments, full,
                                 {at.head_kv, at.batch}, at.n * kBlockN);
  }

 private:
  __device__ __forceinline__ static ProducerState* state() {
    static_assert(sizeof(ProducerState) + sizeof(ConsumerState) <= kCoordinateBytes);
    return reinterpret_cast<ProducerState*>(ptx::dynamic_smem() + Shared::kMap.coordinates +
                                            threadIdx.x / 32 * kCoordinateBytes);
  }
  // One tile before a work tile's first.
  __device__ __forceinline__ ProducerState before(unsigned index) const {
    const WorkTile next(work_tiles, index);
    return {index, next.tiles.end, next.tiles.begin,
            static_cast<int>(work_tiles.shape.heads_per_kv_head.quotient(next.work.head)),
            next.work.batch};
  }
};

}  // namespace dlattn::wmma
