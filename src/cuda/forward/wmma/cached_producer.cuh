#pragma once

#include "cuda/forward/wmma/producer.cuh"
#include "cuda/tile/cache_source.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::wmma {

// The copies of K and V from a cache. Each lane looks up where a row of its warp's lies, a tile
// before it is copied, and tells the lanes that copy chunks of it.
template <typename T, int kHeadDim, int kVariant>
struct CachedProducer : Producer<T, kHeadDim, kVariant> {
  using Base = Producer<T, kHeadDim, kVariant>;
  using Copy = typename Base::Copy;
  static constexpr int kBlockN = Base::kBlockN;
  static constexpr int kLanesOfRow = Copy::Rows::kChunks;            // that copy chunks of a row
  static constexpr int kWarpRows = 32 / kLanesOfRow;                 // that a warp copies at a time
  static constexpr int kOwnRows = kBlockN / Base::kShape.num_warps;  // of a warp, of a tile
  static_assert(kOwnRows <= 32 && kBlockN % Copy::kStep == 0);

  int sequence, head_kv;
  tile::Range seen;    // keys that a row of the work tile sees
  int next;            // the first key of the tile that is copied next
  tile::CacheRow row;  // the lane's of it

  using Base::Base;

  __device__ __forceinline__ void begin(const LaunchShape& shape, const tile::WorkTile& work,
                                        const tile::Range& keys, const TileRange& tiles) {
    sequence = work.batch;
    head_kv = static_cast<int>(shape.heads_per_kv_head.quotient(work.head));
    seen = keys;
    next = (tiles.end - 1) * kBlockN;
    look_up();
  }

  // The names are those of Producer.
  template <typename Sequence>
  __device__ __forceinline__ void copy_first(const Sequence&, const TileRange&) {
    copy(0);
    this->stages.publish(0);
    look_up();
  }
  template <typename Sequence>
  __device__ __forceinline__ void set_next(const Sequence&, const TileRange&) {}
  __device__ __forceinline__ void copy_next(int i) {
    if (i + 1 >= this->count) return;
    if (i > 0) this->stages.wait_empty(i - 1);
    copy(Base::kStageBytes - i % Base::kShape.stages * Base::kStageBytes);
    this->stages.publish(i + 1);
    look_up();
  }

 private:
  // Reads the page of the lane's row of the next tile. Nothing is read for keys that no row sees.
  __device__ __forceinline__ void look_up() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int n = next + lane / kWarpRows * Copy::kStep + warp * kWarpRows + lane % kWarpRows;
    row = {0, 0};
    if (lane < kOwnRows && tile::contains(seen, n))
      row = tile::CacheSource(this->params, sequence).find(n);
  }

  // The next tile to the stage at byte `stage`. Rows that nobody sees become zeros: anything may
  // lie there, NaN too, or nothing.
  __device__ __forceinline__ void copy(int stage) {
    copy_rows(this->sK + stage, this->params.k, this->head_dim);
    copy_rows(this->sV + stage, this->params.v, this->head_dim_v);
    next -= kBlockN;
  }
  __device__ __forceinline__ void copy_rows(ptx::SmemAddress smem, const TensorView& x,
                                            int columns) const {
    const T* const own = static_cast<const T*>(x.data) + head_kv * x.head_stride + row.offset(x);
    Copy::template scattered<kBlockN>(
        smem,
        [&](int first) {
          const int lane = first / Copy::kStep * kWarpRows + threadIdx.x % 32 / kLanesOfRow;
          return reinterpret_cast<const T*>(
              __shfl_sync(tile::kFullMask, reinterpret_cast<std::uintptr_t>(own), lane));
        },
        [&](int row) { return tile::contains(seen, next + row); }, columns);
  }
};

}  // namespace dlattn::wmma
