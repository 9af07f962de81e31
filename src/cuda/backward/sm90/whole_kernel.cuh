#pragma once

// Gradients of few keys in one launch, of plain problems: what `delta` and `convert` do before and
// after the plain kernel, the blocks do that have all keys of a KV head, which are a cluster.
//
// First each block has a share of lse, delta and zeros for the sums of dQ, while its own keys come;
// behind a barrier of the cluster all are there. Then it is as a block of the plain kernel
// (kernel.cuh). Behind another barrier, which additions to the sums are complete before, the blocks
// share them out once more, and write dq. There may be blocks of a cluster without keys.

#include "cuda/backward/sm90/consumer.cuh"
#include "cuda/backward/sm90/convert.cuh"
#include "cuda/backward/sm90/producer.cuh"
#include "cuda/ptx/cluster_memory.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/tile/delta_rows.cuh"

namespace dlattn::backward_sm90 {

// A block's share of what its cluster does beside the plain kernel: every `blocks`-th piece.
struct Share {
  int rank, blocks;

  __device__ __forceinline__ explicit Share(const Problem& p)
      : rank(static_cast<int>(blockIdx.x % p.num_m_blocks.divisor())),
        blocks(static_cast<int>(p.num_m_blocks.divisor())) {}
};

// lse, delta and zeros. By all threads.
template <typename T, int kHeadDim, typename BlockWork>
__device__ __forceinline__ void prepare_heads(const Problem& p, const BackwardParams& b, bool wide,
                                              const BlockWork& work) {
  const Share share(p);
  const auto padded_rows = static_cast<int>(p.padded_rows);
  if (p.dq_sum) {
    const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float* const sums = p.dq_sum + work.first_row * kHeadDim;
    const std::int64_t count = p.heads_per_kv_head * p.padded_rows * kHeadDim;
    const int step = share.blocks * kNumThreads * 4;
    for (std::int64_t i = (share.rank * kNumThreads + static_cast<int>(threadIdx.x)) * 4; i < count;
         i += step)
      tile::store(sums + i, zeros);
    ptx::fence_proxy_async_global();  // the TMA adds to them
  }
  if (threadIdx.x >= tile::kDeltaThreads) return;
  const int row_blocks = padded_rows / kDeltaRows;
  const int first_head = work.head_kv * p.heads_per_kv_head;
#pragma unroll 1
  for (int i = share.rank; i < p.heads_per_kv_head * row_blocks; i += share.blocks)
    tile::compute_delta_rows<T>(b, wide, i % row_blocks, first_head + i / row_blocks, work.batch);
}

// dq. By the consumers.
template <typename T, int kHeadDim, typename BlockWork>
__device__ __forceinline__ void finish_heads(const Problem& p, const BlockWork& work,
                                             int consumer) {
  const Share share(p);
  const tile::SequenceRows rows = {0, work.seqlen_q};
  constexpr int kBlockM = block_m(kHeadDim, false);
  const int tiles = (work.seqlen_q + kBlockM - 1) / kBlockM;
#pragma unroll 1
  for (int i = share.rank; i < p.heads_per_kv_head * tiles; i += share.blocks) {
    const int head = i / tiles;
    convert_part<T, kHeadDim>(p, p.dq_sum + (work.first_row + head * p.padded_rows) * kHeadDim,
                              work.batch, work.head_kv * p.heads_per_kv_head + head, rows,
                              i - head * tiles, consumer);
  }
}

// `wide`: rows of out and dout are read by 16 bytes.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    whole_kernel(const __grid_constant__ Problem problem, const __grid_constant__ TensorMaps maps,
                 const __grid_constant__ BackwardParams params, const bool wide) {
  constexpr Registers kRegisters = registers_of(kHeadDim, false);
  using Memory = Shared<kHeadDim, false>;
  const Memory shared(ptx::smem_address(ptx::dynamic_smem()));
  if (threadIdx.x == 0) {
    shared.init();
    shared.work() = typename Memory::BlockWork(problem, blockIdx.x, false);
  }
  if (threadIdx.x == 32) maps.prefetch();
  __syncthreads();
  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  const auto& work = shared.work();
  const bool has_tiles = work.tiles.begin < work.tiles.end;
  if (threadIdx.x == 0 && has_tiles) start_keys<false>(maps, shared, work.batch);
  prepare_heads<T, kHeadDim>(problem, params, wide, work);
  ptx::cluster_sync_memory();
  // The same in all lanes, and by this the compiler knows.
  const int warpgroup =
      __shfl_sync(tile::kFullMask, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
  if (warpgroup == 0) {
    ptx::lower_registers<kRegisters.producer>();
    if (threadIdx.x < 32 && has_tiles) {
      unsigned use = 0;
      produce_heads<false>(problem, maps, shared, work.batch, work.first_row, &use);
    }
    ptx::cluster_sync_memory();
  } else {
    ptx::raise_registers<kRegisters.consumer>();
    if (work.has_rows())
      Consumer<T, kHeadDim, false, false, false>(problem, shared, warpgroup - 1).run();
    ptx::bulk_wait_written();
    ptx::cluster_sync_memory();
    if (problem.dq_sum) finish_heads<T, kHeadDim>(problem, work, warpgroup - 1);
  }
}

}  // namespace dlattn::backward_sm90
