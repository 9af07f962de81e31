#pragma once

#include "cuda/forward/sm90/products.cuh"
#include "cuda/forward/sm90/setup.cuh"
#include "cuda/forward/sm90/softmax.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/box_source.cuh"
#include "cuda/tile/quad_rows.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::sm90 {

// Returns the factors of this lane's two rows and stores their lse. `first_row` is the consumer's.
// All lanes call it.
template <typename T>
__device__ __forceinline__ void finish_rows(const tile::ResultRows<T>& result,
                                            const tile::SequenceTile& work, int first_row,
                                            const Softmax& softmax, float scale,
                                            float (&scales)[2]) {
  const ThreadIndex thread;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const tile::RowResult row = softmax.finalize(h, scale, result.sink);
    scales[h] = row.scale;
    const int i = first_row + thread.warp * 16 + 8 * h + thread.lane / 4;
    if (result.lse && thread.lane % 4 == 0 && i < work.seqlen_q) result.lse[i] = row.lse;
  }
}

// Stores a consumer's rows, by way of its rows of Q's shared memory `sO`, which TMA has read
// when this returns: the thread for which it returns true may release them.
// kOrFixed: only the parameters tell whether queries are of variable length.
template <typename T, int kHeadDim, bool kVarlen, bool kOrFixed>
__device__ __forceinline__ bool store_results(const AttentionParams& params, const KernelArgs& args,
                                              const tile::SequenceTile& work, int first_row,
                                              int consumer, ptx::SmemAddress sO,
                                              const float (&scales)[2],
                                              const float (&acc_o)[kHeadDim / 2]) {
  const ThreadIndex thread;
  const int warp = thread.warp, lane = thread.lane;
  ptx::barrier_sync(kWarpgroupBarrier + consumer, kWarpgroupThreads);  // all have done with Q
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16) {
    std::uint32_t rO[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* const x = acc_o + d / 2 + 2 * e;
      rO[e] = tile::pack<T>(tile::scaled(x[0], scales[e % 2]), tile::scaled(x[1], scales[e % 2]));
    }
    const int row = warp * 16 + lane % 16;
    // seed: store-swizzled
    ptx::stmatrix_x4(sO + swizzled_offset(row, d / 8 + lane / 16, kWarpgroupRows), rO);
  }
  ptx::fence_proxy_async();
  ptx::barrier_sync(kWarpgroupBarrier + consumer, kWarpgroupThreads);
  if (thread.index != 0) return false;
  if (first_row < work.seqlen_q) {
    const auto store = [&](const auto& rows) {
#pragma unroll
      for (int d = 0; d < kHeadDim; d += kBlockColumns) {
        if (d < params.head_dim_v) rows.store(args.out, sO + d * kBlockRowBytes, d, first_row);
      }
    };
    if constexpr (kOrFixed) {
      tile::with_query_boxes(params, work, store);
    } else {
      store(tile::box_source<kVarlen>(work.head, work.batch, work.start_q, work.seqlen_q));
    }
    ptx::tma_store_commit();
    ptx::tma_store_wait_read();
  }
  return true;
}

// Stores a consumer's rows, 16 bytes a lane, without shared memory.
template <typename T, int kHeadDim>
__device__ __forceinline__ void store_from_registers(const AttentionParams& params,
                                                     const tile::ResultRows<T>& result,
                                                     const tile::SequenceTile& work, int first_row,
                                                     const float (&scales)[2],
                                                     const float (&acc_o)[kHeadDim / 2]) {
  const ThreadIndex thread;
  const int lane = thread.lane;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = first_row + thread.warp * 16 + 8 * h + lane / 4;
    T* out = result.out + i * params.out.row_stride + lane % 4 * 8;
    const int columns = i < work.seqlen_q ? static_cast<int>(params.head_dim_v) - lane % 4 * 8 : 0;
    tile::store_quad_row<T, kHeadDim>(out, columns, scales[h], lane,
                                      [&](int j) { return acc_o + 4 * j + 2 * h; });
  }
}

}  // namespace dlattn::sm90
