#pragma once

#include "cuda/forward/wmma/cached_producer.cuh"
#include "cuda/forward/wmma/output.cuh"
#include "cuda/forward/wmma/producer.cuh"
#include "cuda/forward/wmma/stages.cuh"
#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/forward/wmma/walk.cuh"
#include "cuda/forward/wmma/warp_rows.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma {

// A warp's way through the block's work tile: its own rows, and all keys that the block's rows see.
// kCached: these lie in a cache.
template <typename T, int kHeadDim, int kVariant, bool kPackGqa, bool kCached = false>
struct Consumer {
  static constexpr TileShape kShape = tile_shape(kHeadDim, kVariant);
  static constexpr SmemMap kMap = smem_map(kHeadDim, kVariant);
  static constexpr int kBlockM = block_m(kShape);
  static constexpr int kBlockN = kShape.block_n;
  static constexpr bool kOverlaid = kShape.query_location == QueryLocation::kRegistersOverlaid;
  // Under software pipelining no warp waits in the long loop for its stage to be free before it
  // must. Edge tiles are too few for warps to be apart, and their copies are waited for. In small
  // blocks of short rows the copies' instructions had better not delay the first products.
  static constexpr bool kCopyLate =
      resolved(kShape.handover) == Handover::kMbarrier || (kVariant == kNarrow && kHeadDim <= 64);
  // Whether what is needed after the loop, or seldom in it, is worked out again rather than kept:
  // there is no register to spare in the loop.
  static constexpr bool kScarce = kHeadDim > 64;
  using Mask = std::conditional_t<kCached, tile::PaddedMask<tile::RowMask<kPackGqa>>,
                                  tile::RowMask<kPackGqa>>;
  using TileRows = tile::Rows<kPackGqa>;
  using Sequence = std::conditional_t<kCached, tile::CachedSequence<T>, tile::Sequence<T>>;
  using WarpRows = wmma::WarpRows<T, kHeadDim, kVariant>;
  using Producer = std::conditional_t<kCached, CachedProducer<T, kHeadDim, kVariant>,
                                      wmma::Producer<T, kHeadDim, kVariant>>;

  const AttentionParams& params;
  const LaunchShape& shape;
  const TileRows& tile_rows;
  const tile::WorkTile work;
  const Sequence seq;
  const int lane_idx = threadIdx.x % 32;
  const int warp_row = row_group() * WarpRows::kRows;  // the warp's first in the work tile
  const TileRange tiles;                               // the block's
  Producer producer;
  int i = 0;  // how many tiles have been walked

  __device__ __forceinline__ Consumer(const AttentionParams& params, const LaunchShape& shape,
                                      const TileRows& tile_rows, const tile::WorkTile& work,
                                      const Sequence& seq)
      : params(params),
        shape(shape),
        tile_rows(tile_rows),
        work(work),
        seq(seq),
        tiles(tiles_of(work, seq)),
        producer(params, tiles) {}

  // Which of the block's groups of rows this warp has.
  __device__ __forceinline__ static int row_group() {
    return wmma::row_group(kShape.num_warps, static_cast<int>(threadIdx.x) / 32);
  }

  __device__ __forceinline__ void run(WarpRows& rows) {
    if (tiles.begin < tiles.end) begin(rows);
    // Whether registers are enough for `tiles` at edge tiles.
    constexpr bool kKeepsTiles = !kScarce || kShape.blocks_per_sm <= 2;
    walk_tiles<kBlockN, kKeepsTiles>(*this, rows, own_tiles(tiles, work, seq));
    end(rows);
  }

  // Q, the last tile of K and V, and where the others are.
  __device__ __forceinline__ void begin(WarpRows& rows) {
    if constexpr (kCached) {
      const int first = work.m_block * kBlockM;
      producer.begin(shape, work, mask_of(seq).any_row(first, last_row(first, seq)), tiles);
    }
    copy_queries();
    if constexpr (!kOverlaid) producer.copy_first(seq, tiles);
    if constexpr (WarpRows::kInRegisters) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
      rows.load_queries();
    }
    if constexpr (kOverlaid) {
      __syncthreads();  // all warps have Q: K and V may overwrite it
      producer.copy_first(seq, tiles);
    }
    producer.set_next(seq, tiles);
  }

  // A tile of which every row sees every key: S = Q K^T, P = exp(S - row max), O += P V. Returns
  // how many keys it has done (WarpRows).
  __device__ __forceinline__ int step(WarpRows& rows) {
    producer.stages.wait_full(i);
    if constexpr (!kCopyLate) producer.copy_next(i);
    const int keys = rows.attend(*this, shape.scale_log2);
    if (keys == kBlockN) producer.stages.release(i, lane_idx);
    return keys;
  }
  __device__ __forceinline__ void after_softmax() {
    if constexpr (kCopyLate) producer.copy_next(i);
  }

  // The same under a mask, of tile n's keys from `begin` on; `begun`: after step().
  __device__ __forceinline__ void step_edge(WarpRows& rows, int n, int begin, bool begun) {
    if (!begun) producer.stages.wait_full(i);
    if (!begun || (kCopyLate && begin == 0)) producer.copy_next(i);
    const Sequence same = sequence_again();
    const Mask mask = mask_of(same);
    const int first_row = work_again().m_block * kBlockM + warp_row;
    rows.attend_edge(mask, first_row, n, begin, lane_k(), lane_v(), shape.scale_log2, lane_idx);
    producer.stages.release(i, lane_idx);
  }

  // O = O / row sum, and the rows' lse.
  __device__ __forceinline__ void end(WarpRows& rows) {
    const tile::WorkTile done = work_again();
    write_results<kHeadDim, false, kOverlaid>(
        params, shape, tile::ResultRows<T>(params, done), tile_rows,
        done.m_block * kBlockM + warp_row, rows.softmax, shape.scale_log2, rows.acc_o,
        ptx::dynamic_smem() + kMap.q + row_group() * WarpRows::kBytes, lane_idx);
  }

  // Where tile i's K and V begin for this lane's ldmatrix.
  __device__ __forceinline__ ptx::SmemAddress lane_k() const {
    return producer.k(i) + tile::mma::lane_offset_across<kHeadDim>(lane_idx);
  }
  __device__ __forceinline__ ptx::SmemAddress lane_v() const {
    return producer.v(i) + tile::mma::lane_offset_down<kHeadDim>(lane_idx);
  }

  __device__ __forceinline__ TileRange tiles_again(const TileRange& tiles) const {
    if constexpr (!kScarce) return tiles;
    const tile::WorkTile same = work_again();
    const Sequence seq = sequence_again();
    return own_tiles(tiles_of(same, seq), same, seq);
  }

 private:
  __device__ __forceinline__ void copy_queries() const {
    using Copy = typename Producer::Copy;
    const ptx::SmemAddress sQ = ptx::smem_address(ptx::dynamic_smem()) + kMap.q;
    const int m0 = work.m_block * kBlockM;
    const int count = tile_rows.count(seq.seqlen_q) - m0;
    if constexpr (kPackGqa) {
      const auto row_address = [&](int row) {
        return seq.q + tile_rows.offset(m0 + row, params.q.row_stride, params.q.head_stride);
      };
      Copy::template gather<kBlockM>(sQ, row_address, count, producer.head_dim);
    } else {
      Copy::template edge<kBlockM>(sQ, seq.q + m0 * params.q.row_stride, params.q.row_stride, count,
                                   producer.head_dim);
    }
  }

  __device__ __forceinline__ tile::WorkTile work_again() const {
    return kScarce ? tile_rows.work(ptx::reread_block_index()) : work;
  }
  __device__ __forceinline__ Sequence sequence_again() const {
    if constexpr (kScarce) {
      return Sequence(params, shape, work_again());
    } else {
      return seq;
    }
  }
  __device__ __forceinline__ Mask mask_of(const Sequence& seq) const {
    if constexpr (kCached) {
      return Mask(shape, seq.shift, seq.seqlen_k, seq.first_key);
    } else {
      return Mask(shape, seq.shift, seq.seqlen_k);
    }
  }
  // The last row of the work tile that begins with row `first`.
  __device__ __forceinline__ int last_row(int first, const Sequence& seq) const {
    return min(first + kBlockM, tile_rows.count(seq.seqlen_q)) - 1;
  }
  __device__ __forceinline__ TileRange tiles_of(const tile::WorkTile& work,
                                                const Sequence& seq) const {
    const int first = work.m_block * kBlockM;
    return {mask_of(seq), first, last_row(first, seq), kBlockN};
  }
  // The block's tiles as this warp walks them.
  __device__ __forceinline__ TileRange own_tiles(const TileRange& tiles, const tile::WorkTile& work,
                                                 const Sequence& seq) const {
    const int first = work.m_block * kBlockM + warp_row;
    return tiles.of_warp(mask_of(seq), first, first + WarpRows::kRows - 1, kBlockN);
  }
};

}  // namespace dlattn::wmma
