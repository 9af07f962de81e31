#pragma once

#include "cuda/forward/wmma/copy.cuh"
#include "cuda/forward/wmma/stages.cuh"
#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/forward/wmma/traits.h"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma {

// Copies kRows rows whatever they are aligned to. They are complete after a commit, a wait and a
// barrier.
template <typename Copy, int kRows, typename T>
__device__ __forceinline__ void copy_any_rows(unsigned char* smem, const T* gmem,
                                              std::int64_t row_stride, int rows, int columns,
                                              int copy_bytes) {
  if (copy_bytes == 16) {
    Copy::template edge<kRows>(ptx::smem_address(smem), gmem, row_stride, rows, columns);
  } else {
    Copy::template unaligned<kRows>(smem, gmem, row_stride, rows, columns, copy_bytes);
  }
}

// As Producer, for rows of any alignment, with keys in the order of RowsByLane. Two stages, one
// after the other.
template <typename T, int kHeadDim>
struct GeneralProducer {
  static constexpr TileShape kShape = tile_shape(kHeadDim, kGeneral);
  static constexpr SmemMap kMap = smem_map(kHeadDim, kGeneral);
  static constexpr int kThreads = kShape.num_warps * 32;
  static constexpr int kBlockM = block_m(kShape);
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kStageBytes = kBlockN * kHeadDim * static_cast<int>(sizeof(T));
  using QueryCopy = TileCopy<T, kHeadDim, kThreads>;
  using KeyCopy = TileCopy<T, kHeadDim, kThreads, false, RowsByLane>;

  const AttentionParams& params;
  const LaunchShape& shape;
  const int head_dim, head_dim_v;
  const Stages<kShape.num_warps, kShape.handover, 2> stages;
  const T* next_k = nullptr;  // where the copy of the next tile begins, of rows aligned to 16 bytes
  const T* next_v = nullptr;

  __device__ __forceinline__ GeneralProducer(const AttentionParams& params,
                                             const LaunchShape& shape)
      : params(params),
        shape(shape),
        head_dim(static_cast<int>(params.head_dim)),
        head_dim_v(static_cast<int>(params.head_dim_v)),
        stages(ptx::smem_address(ptx::dynamic_smem()) + kMap.mbarriers) {}

  __device__ __forceinline__ void copy_queries(const tile::Sequence<T>& seq, int m0) const {
    copy_any_rows<QueryCopy, kBlockM>(ptx::dynamic_smem() + kMap.q,
                                      seq.q + m0 * params.q.row_stride, params.q.row_stride,
                                      seq.seqlen_q - m0, head_dim, shape.copy_bytes);
  }

  // Tile n, the i-th of the walk, to `stage`. Only the last one may be ragged.
  __device__ __forceinline__ void copy_tile(int n, int i, int stage, bool last) {
    unsigned char* sK = ptx::dynamic_smem() + kMap.k + stage;
    unsigned char* sV = ptx::dynamic_smem() + kMap.v + stage;
    if (!last && shape.copy_bytes == 16) {
      KeyCopy::template full_tile<kBlockN>(ptx::smem_address(sK), next_k, params.k.row_stride,
                                           head_dim);
      KeyCopy::template full_tile<kBlockN>(ptx::smem_address(sV), next_v, params.v.row_stride,
                                           head_dim_v);
    } else {
      const tile::Sequence<T> same = sequence_again();
      const std::int64_t n0 = n * kBlockN;
      const int keys = same.seqlen_k - static_cast<int>(n0);
      copy_any_rows<KeyCopy, kBlockN>(sK, same.keys.k.row(n0), same.keys.k.stride, keys, head_dim,
                                      shape.copy_bytes);
      copy_any_rows<KeyCopy, kBlockN>(sV, same.keys.v.row(n0), same.keys.v.stride, keys, head_dim_v,
                                      shape.copy_bytes);
    }
    stages.publish(i, shape.copy_bytes >= 4);
  }

  // Where copy_tile() goes on after the last tile.
  __device__ __forceinline__ void set_next(const tile::Sequence<T>& seq, const TileRange& tiles) {
    const int n0 = (tiles.end - 2) * kBlockN;
    next_k = KeyCopy::template last_row<kBlockN>(seq.keys.k, n0);
    next_v = KeyCopy::template last_row<kBlockN>(seq.keys.v, n0);
  }

  // What is needed seldom is worked out again rather than kept: registers are scarce.
  __device__ __forceinline__ tile::WorkTile work_again() const {
    return tile::scheduled_tile(shape, ptx::reread_block_index());
  }
  __device__ __forceinline__ tile::Sequence<T> sequence_again() const {
    return tile::Sequence<T>(params, shape, work_again());
  }
};

}  // namespace dlattn::wmma
