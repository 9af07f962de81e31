#pragma once

// The kernel of kernel.cuh for keys in a cache: pages of a pool, or entries. Its copies look up
// where each row lies (cached_producer.cuh); all else is the same.

#include "cuda/forward/wmma/consumer.cuh"
#include "cuda/ptx/grid_dependency.cuh"

namespace dlattn::wmma {

template <typename T, int kHeadDim, int kVariant>
__global__ void __launch_bounds__(tile_shape(kHeadDim, kVariant).num_warps * 32,
                                  tile_shape(kHeadDim, kVariant).blocks_per_sm)
    cached_kernel(const __grid_constant__ AttentionParams params,
                  const __grid_constant__ LaunchShape shape) {
  static_assert(reads_caches(kHeadDim, kVariant));
  using Consumer = wmma::Consumer<T, kHeadDim, kVariant, false, true>;
  const tile::Rows<false> tile_rows{shape};
  const tile::WorkTile work = tile_rows.work(blockIdx.x);
  ptx::wait_for_grids_ahead();
  const tile::CachedSequence<T> seq(params, shape, work);
  if (work.m_block * Consumer::kBlockM >= seq.seqlen_q) return;
  using WarpRows = typename Consumer::WarpRows;
  WarpRows rows(ptx::smem_address(ptx::dynamic_smem()) + Consumer::kMap.q +
                    Consumer::row_group() * WarpRows::kBytes,
                threadIdx.x % 32);
  Consumer(params, shape, tile_rows, work, seq).run(rows);
}

}  // namespace dlattn::wmma
