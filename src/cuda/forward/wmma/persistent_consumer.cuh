#pragma once

#include "cuda/forward/wmma/direct_output.cuh"
#include "cuda/forward/wmma/persistent_producer.cuh"
#include "cuda/forward/wmma/walk.cuh"
#include "cuda/forward/wmma/warp_rows.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma {

// A warp's rows of one work tile after the other. It also starts the copies of every kNumWarps-th
// tile of keys (PersistentProducer), half of the stages ahead of the one that it works on.
template <typename T, int kHeadDim>
struct PersistentConsumer {
  static constexpr TileShape kShape = tile_shape(kHeadDim, kPersistent);
  static constexpr int kBlockN = kShape.block_n;
  static constexpr unsigned kLookahead = kShape.stages / 2;  // tiles on their way beyond this one
  static_assert(kLookahead < kShape.stages);
  using Shared = PersistentShared<T, kHeadDim>;
  using Producer = PersistentProducer<T, kHeadDim>;
  using WorkTile = typename Producer::WorkTile;
  using WarpRows = wmma::WarpRows<T, kHeadDim, kPersistent>;

  const AttentionParams& params;
  const LaunchShape& shape;
  const PersistentTiles& work_tiles;
  const Shared& shared;
  const Producer& producer;
  const int lane_idx = threadIdx.x % 32;
  const int warp_idx = threadIdx.x / 32;
  int i = 0;  // how many tiles of keys have been walked, of all work tiles
  ConsumerState own;

  __device__ __forceinline__ void run() {
    const unsigned num_tiles = work_tiles.count;
    const unsigned first = work_tiles.next(work_tiles.before_first());
    producer.load_queries(first, 0, warp_idx, lane_idx);
    if (lane_idx == 0) producer.init();
#pragma unroll
    for (unsigned ahead = 0; ahead < kLookahead; ++ahead) producer.load(ahead);
    set_state({first, 0});
#pragma unroll 1
    for (; state().index < num_tiles;
         set_state({work_tiles.next(state().index), state().done + 1})) {
      WarpRows rows(shared.q(warp_idx), lane_idx);
      begin(rows);
      walk_tiles<kBlockN, true>(*this, rows, own_tiles());
      end(rows);
    }
  }

  // Q, which is in shared memory till all lanes have it.
  __device__ __forceinline__ void begin(WarpRows& rows) {
    ptx::mbarrier_sleep(shared.query_mbarrier(warp_idx), static_cast<int>(state().done % 2));
    if constexpr (WarpRows::kInRegisters) {
      rows.load_queries();
      load_next_queries();
    }
  }

  // A tile of which every row sees every key: S = Q K^T, P = exp(S - row max), O += P V. Returns
  // how many keys it has done (WarpRows).
  __device__ __forceinline__ int step(WarpRows& rows) {
    shared.ring.wait_full(i);
    const int keys = rows.attend(*this, shape.scale_log2);
    if (keys == kBlockN) release();
    return keys;
  }
  __device__ __forceinline__ void after_softmax() { producer.load(i + kLookahead); }

  // The same under a mask, of tile n's keys from `begin` on; `begun`: after step(). Addresses are
  // worked out from numbers that are reread, so that no register keeps what comes of them.
  __device__ __forceinline__ void step_edge(WarpRows& rows, int n, int begin, bool begun) {
    if (!begun) shared.ring.wait_full(i);
    if (begin == 0) producer.load(i + kLookahead);
    const WorkTile same(work_tiles, state().index);
    const ptx::SmemAddress base = ptx::reread(shared.base);
    const int lane = static_cast<int>(ptx::reread(static_cast<unsigned>(lane_idx)));
    rows.attend_edge(same.mask, first_row(same, warp_idx), n, begin, lane_k(base, lane),
                     lane_v(base, lane), shape.scale_log2, lane_idx);
    release();
  }

  // O = O / row sum, and the rows' lse, from registers: the shared memory of Q has the next rows.
  __device__ __forceinline__ void end(WarpRows& rows) {
    if constexpr (!WarpRows::kInRegisters) load_next_queries();
    const WorkTile done(work_tiles, state().index);
    // Its index in the block is reread, to leave the tiles' loops a register more.
    const int warp = static_cast<int>(ptx::reread_thread_index()) / 32;
    write_from_registers<kHeadDim>(params, tile::ResultRows<T>(params, done.work),
                                   first_row(done, warp), rows.softmax,
                                   ptx::reread(shape.scale_log2), rows.acc_o, lane_idx);
  }

  // Where tile i's K and V begin for this lane's ldmatrix.
  __device__ __forceinline__ ptx::SmemAddress lane_k() const {
    return lane_k(shared.base, lane_idx);
  }
  __device__ __forceinline__ ptx::SmemAddress lane_v() const {
    return lane_v(shared.base, lane_idx);
  }

  __device__ __forceinline__ TileRange tiles_again(const TileRange& tiles) const {
    if constexpr (kHeadDim <= 64) return tiles;
    return own_tiles();
  }

 private:
  __device__ __forceinline__ int first_row(const WorkTile& tile, int warp) const {
    return tile.m0 + Shared::warp_row(warp, state().done);
  }
  // The work tile's tiles of keys as this warp walks them.
  __device__ __forceinline__ TileRange own_tiles() const {
    const WorkTile tile(work_tiles, state().index);
    const int first = first_row(tile, warp_idx);
    return tile.tiles.of_warp(tile.mask, first, first + WarpRows::kRows - 1, kBlockN);
  }

  __device__ __forceinline__ ptx::SmemAddress lane_k(ptx::SmemAddress base, int lane) const {
    return base + Shared::kMap.k + i % kShape.stages * Shared::kStageBytes +
           tile::mma::lane_offset_across<kHeadDim, kBlockN>(lane);
  }
  __device__ __forceinline__ ptx::SmemAddress lane_v(ptx::SmemAddress base, int lane) const {
    return base + Shared::kMap.v + i % kShape.stages * Shared::kStageBytes +
           tile::mma::lane_offset_down<kHeadDim, kBlockN>(lane);
  }

  __device__ __forceinline__ void release() const {
    __syncwarp();
    if (lane_idx == 0) shared.ring.release(i);
  }

  __device__ __forceinline__ void load_next_queries() const {
    __syncwarp();  // all lanes have done with this work tile's
    producer.load_queries(work_tiles.next(state().index), state().done + 1, warp_idx, lane_idx);
  }

  // The warp's work tile, in shared memory where Q leaves no registers for it.
  __device__ __forceinline__ ConsumerState state() const {
    if constexpr (WarpRows::kInRegisters) return own;
    return *shared_state();
  }
  __device__ __forceinline__ void set_state(ConsumerState next) {
    if constexpr (WarpRows::kInRegisters) {
      own = next;
    } else {
      __syncwarp();  // all lanes have done with the one before
      if (lane_idx == 0) *shared_state() = next;
      __syncwarp();
    }
  }
  __device__ __forceinline__ ConsumerState* shared_state() const {
    return reinterpret_cast<ConsumerState*>(ptx::dynamic_smem() + Shared::kMap.coordinates +
                                            warp_idx * kCoordinateBytes + sizeof(ProducerState));
  }
};

}  // namespace dlattn::wmma
