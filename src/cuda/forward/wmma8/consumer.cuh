#pragma once

#include <cstdint>

#include "cuda/forward/wmma8/copy.cuh"
#include "cuda/forward/wmma8/output.cuh"
#include "cuda/forward/wmma8/products.cuh"
#include "cuda/forward/wmma8/traits.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/stages.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::wmma8 {

static_assert(kMbarrierBytes == ptx::kMbarrierBytes);

// A warp's way through the block's work tile: its own rows, and all keys that the block's rows see.
// All threads of the block copy. `Inputs`: of which elements q, k and v are, what becomes of q and
// of results (e4m3_inputs.cuh, int8_inputs.cuh).
template <typename Inputs>
struct Consumer {
  static constexpr int kHeadDim = Inputs::kHeadDim;
  static constexpr bool kGeneral = Inputs::kGeneral;
  using Rows = typename Inputs::Rows;
  using Scores = typename Inputs::Scores;
  using Sequence = typename Inputs::Sequence;
  static constexpr TileShape kShape = tile_shape(kHeadDim);
  using Stages = tile::MbarrierStages<kShape.num_warps, kShape.stages>;
  static constexpr SmemMap kMap = smem_map(kHeadDim, Inputs::kValueBytes);
  static constexpr int kBlockM = block_m(kShape), kBlockN = kShape.block_n;
  static constexpr int kStages = kShape.stages, kThreads = kShape.num_warps * 32;

  const Inputs& inputs;
  const AttentionParams& params;
  const LaunchShape& shape;
  const tile::WorkTile& work;
  const Sequence& seq;
  const int lane_idx = threadIdx.x % 32;
  tile::Mask mask;  // of the warp's rows, counted from its first, and the keys from tile i's first
                    // on
  int i = 0;        // of the tiles, how many have been walked
  int count = 0;    // of the tiles that the block's rows see; walked from the last to the first
  int last = 0;     // of them, counted from the sequence's first
  typename Inputs::KeyTile next = {};  // the tile that is copied next

  __device__ __forceinline__ Consumer(const Inputs& inputs, const tile::WorkTile& work,
                                      const Sequence& seq)
      : inputs(inputs),
        params(inputs.params),
        shape(inputs.shape),
        work(work),
        seq(seq),
        mask(shape, seq.shift + first_row_of(work), seq.seqlen_k) {}

  __device__ __forceinline__ void run(Rows& rows) {
    const int m0 = work.m_block * kBlockM;
    const tile::Range tiles = tiles_of(
        tile::Mask(shape, seq.shift, seq.seqlen_k).any_row(m0, min(m0 + kBlockM, seq.seqlen_q) - 1),
        kBlockN);
    count = tiles.end - tiles.begin;
    last = tiles.end - 1;
    const Scores scores = inputs.scores(work, last);
    if (count > 0) begin(rows);
#pragma unroll 1
    for (; i < count; ++i) step(rows, scores);
    end(rows, scores);
  }

  // The tile at hand, counted from the sequence's first.
  __device__ __forceinline__ int tile() const { return last - i; }

  // The copies of tile i + 1 start once tile i's softmax is made: by then other warps have released
  // the stage, if ever. But where registers are scarce they start before.
  static constexpr bool kCopyLate = kHeadDim <= 128;
  __device__ __forceinline__ void after_softmax() {
    if constexpr (kCopyLate) copy_next();
  }

 private:
  __device__ __forceinline__ void copy_next() {
    if (i + 1 >= count) return;
    if (i > 0) stages().wait_empty(i - 1);
    start_tile<true>(i + 1);
  }

  // Q, and the first tile.
  __device__ __forceinline__ void begin(Rows& rows) {
    if (threadIdx.x == 0) stages().init();
    const int m0 = work.m_block * kBlockM, n0 = last * kBlockN;
    if constexpr (Inputs::kCopiesQuery) {
      // seed: query-rows
      copy<kBlockM, kHeadDim, false>(kMap.q, seq.q + m0 * params.q.row_stride, params.q.row_stride,
                                     seq.seqlen_q - m0, params.head_dim);
    }
    __syncthreads();  // the mbarriers are initialised
    mask.shift -= n0;
    mask.seqlen_k -= n0;
    next = inputs.key_tile(work, seq, n0);
    // The sequence's last tile is the only one that may be ragged.
    start_tile<false>(0, mask.seqlen_k);
    if constexpr (Inputs::kCopiesQuery) {
      stages().wait_full(0);  // and so for Q's copies, which came before
      rows.load_queries(smem() + kMap.q);
      if (kShape.query_in_registers) __syncthreads();  // all warps have it: V may overwrite it
    } else {
      rows.load_queries(inputs.queries(seq), first_row_of(work), seq.seqlen_q, lane_idx);
    }
  }

  // Tile i of the walk.
  __device__ __forceinline__ void step(Rows& rows, const Scores& scores) {
    stages().wait_full(i);
    if constexpr (!kCopyLate) copy_next();
    const ptx::SmemAddress at = smem() + stage(i);
    rows.attend(*this, scores, mask, at + lane_offset_k<kHeadDim>(lane_idx),
                at + kMap.v + Rows::lane_offset_v(lane_idx), lane_idx);
    mask.shift += kBlockN;
    mask.seqlen_k += kBlockN;
    stages().release(i, lane_idx);
  }

  // O = O / row sum, and the rows' lse. Numbers of the work tile are computed again rather than
  // kept: registers are scarce in the loop.
  __device__ __forceinline__ void end(Rows& rows, const Scores& scores) const {
    const tile::WorkTile done = tile::scheduled_tile(shape, ptx::reread_block_index());
    const Sequence same(params, shape, done);
    const tile::Mask mask(shape, same.shift, same.seqlen_k);
    const int first_row = first_row_of(done);
    const auto results = inputs.results(done, same, scores);
    const auto write = [&](auto elements) {
      write_results<Inputs::kWholeColumns>(params, shape, done, mask, first_row, rows, lane_idx,
                                           results, elements);
    };
    const bool is_half = params.out.dtype == DType::kFloat16;
    if constexpr (Inputs::kFloat32Out) {
      if (is_half) return write(KnownElements<half>());
      if (params.out.dtype == DType::kFloat32) return write(KnownElements<float>());
      write(KnownElements<__nv_bfloat16>());
    } else {
      write(Elements16{is_half});
    }
  }

  // The shuffle tells the compiler that it is the same in all lanes, so that warps stay together.
  __device__ __forceinline__ static int first_row_of(const tile::WorkTile& work) {
    const int warp = __shfl_sync(tile::kFullMask, static_cast<int>(threadIdx.x) / 32, 0);
    return work.m_block * kBlockM + warp * Rows::kRows;
  }

  // Starts the copies of tile `index` of the walk. `keys` of it exist; kAll: all.
  template <bool kAll>
  __device__ __forceinline__ void start_tile(int index, int keys = kBlockN) {
    copy<kBlockN, kHeadDim, kAll>(stage(index), inputs.k(next), inputs.row_stride(params.k), keys,
                                  inputs.columns(params.head_dim));
    constexpr int kBytes = Inputs::kValueBytes;
    copy<kBlockN, kHeadDim * kBytes, kAll>(stage(index) + kMap.v, inputs.v(next),
                                           inputs.row_stride(params.v) * kBytes, keys,
                                           inputs.columns(params.head_dim_v) * kBytes);
    inputs.template step_back<kBlockN>(&next);
    stages().publish(index, !Inputs::kUnaligned || shape.copy_bytes >= 4);
  }

  __device__ __forceinline__ static Stages stages() { return {smem() + kMap.mbarriers}; }
  // Where a tile's stage begins in shared memory.
  __device__ __forceinline__ static int stage(int index) {
    return index % kStages * kMap.stage_bytes;
  }

  // kRows rows of kRowBytes to `offset` of shared memory, of which `rows` exist.
  template <int kRows, int kRowBytes, bool kAll>
  __device__ __forceinline__ void copy(int offset, const std::uint8_t* from,
                                       std::int64_t row_stride, int rows,
                                       std::int64_t columns) const {
    using Copy = ByteCopy<kRows, kRowBytes, kThreads>;
    const int count = static_cast<int>(columns);
    if (Inputs::kUnaligned && shape.copy_bytes < 16) {
      Copy::start_unaligned(ptx::dynamic_smem() + offset, from, row_stride, rows, count,
                            shape.copy_bytes);
    } else {
      Copy::template start<kAll>(smem() + offset, from, row_stride, rows, count);
    }
  }

  __device__ __forceinline__ static ptx::SmemAddress smem() {
    return ptx::smem_address(ptx::dynamic_smem());
  }
};

// The whole work of a thread block.
template <typename Inputs>
__device__ __forceinline__ void attend(const Inputs& inputs) {
  using Consumer = wmma8::Consumer<Inputs>;
  const tile::WorkTile work = tile::scheduled_tile(inputs.shape, blockIdx.x);
  ptx::wait_for_grids_ahead();
  const typename Inputs::Sequence seq(inputs.params, inputs.shape, work);
  if (work.m_block * Consumer::kBlockM >= seq.seqlen_q) return;
  typename Inputs::Rows rows;
  Consumer(inputs, work, seq).run(rows);
}

}  // namespace dlattn::wmma8
