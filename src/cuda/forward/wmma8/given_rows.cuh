#pragma once

#include <type_traits>

#include "cuda/forward/wmma8/traits.h"
#include "cuda/plan/launch_shape.h"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/given_scores.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma8 {

// The caller's bias and mask of a warp's rows. Which work tile it is is found again for each tile
// of keys rather than kept: registers are scarce.
struct GivenRows {
  const AttentionParams& params;
  const LaunchShape& shape;

  __device__ __forceinline__ GivenRows(const AttentionParams& params, const LaunchShape& shape)
      : params(params), shape(shape) {}

  __device__ __forceinline__ bool has_bias() const { return params.bias.data != nullptr; }
  __device__ __forceinline__ bool has_mask() const { return params.mask.data != nullptr; }

  __device__ __forceinline__ tile::GivenScores scores() const {
    constexpr int kBlockM = block_m(tile_shape(64)), kRows = kBlockM / tile_shape(64).num_warps;
    const tile::WorkTile work = tile::scheduled_tile(shape, ptx::reread_block_index());
    const int warp = static_cast<int>(ptx::reread_thread_index()) / 32;
    const int seqlen_q = params.cu_seqlens_q ? tile::query_rows(params, work.batch).count
                                             : static_cast<int>(params.seqlen_q);
    return {params, work, work.m_block * kBlockM + warp * kRows, seqlen_q};
  }
};

// Stands in for it in kernels that have none.
struct NoGivenRows {
  __device__ __forceinline__ NoGivenRows(const AttentionParams&, const LaunchShape&) {}
};
template <bool kGeneral>
using GivenRowsOf = std::conditional_t<kGeneral, GivenRows, NoGivenRows>;

}  // namespace dlattn::wmma8
