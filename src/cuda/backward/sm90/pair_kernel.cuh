#pragma once

// Gradients of wide heads without modified scores, by clusters of two thread blocks: of 128 keys
// the first one has dV, the second one dK, and each half of the columns of dQ. A step of 64
// queries:
//
//   first block   P = exp2(K Q^T)   -> P ->   dV += P^T dO    dQ  = dS K, columns 0 to 127
//   second block  dP = V dO^T    dS = P (dP - delta)  -> dS -> dK += dS^T Q,  dQ, the other columns
//
// P goes to the second block by st.async, dS to the first one by a bulk copy, both to shared memory
// and with mbarriers there that count their bytes. So each block has accumulators of all columns of
// 64 keys a consumer, and both products with them have scores in registers. Additions to dQ, which
// bound kernels of 64 keys, are half as many, and both blocks share what is read of dO.

#include "cuda/backward/sm90/pair_consumer.cuh"
#include "cuda/backward/sm90/pair_producer.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/registers.cuh"

namespace dlattn::backward_sm90 {

template <typename T, int kHeadDim, int kRank>
__device__ __forceinline__ void run_pair_block(const Problem& problem, const TensorMaps& maps) {
  constexpr Registers kRegisters = registers_of(kHeadDim, false);
  const PairShared<kHeadDim, kRank> shared(ptx::smem_address(ptx::dynamic_smem()));
  if (threadIdx.x == 0) shared.init();
  ptx::cluster_sync();
  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  const unsigned index = blockIdx.x / kPairBlocks;
  if (index >= problem.num_blocks) return;
  if (threadIdx.x == 0) shared.work() = PairWork(problem, index, false);
  __syncthreads();
  if (!shared.work().has_rows()) return;
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::lower_registers<kRegisters.producer>();
    if (threadIdx.x < 32) {
      const PairProducer<kHeadDim, kRank> producer = {problem, maps, shared};
      if (problem.cu_seqlens_q) {
        producer.template run<true>();
      } else {
        producer.template run<false>();
      }
    }
    if constexpr (kRank == 1) {
      if (threadIdx.x == 32) send_score_gradients(problem, shared);
    }
  } else {
    ptx::raise_registers<kRegisters.consumer>();
    // The same in all lanes, and by this the compiler knows.
    const int warpgroup =
        __shfl_sync(tile::kFullMask, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    using Own =
        std::conditional_t<kRank == 0, ValueConsumer<T, kHeadDim>, KeyConsumer<T, kHeadDim>>;
    Own(problem, shared, warpgroup - 1).run();
  }
  // The other block writes and arrives here as long as it works.
  ptx::cluster_leave();
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    pair_kernel(const __grid_constant__ Problem problem, const __grid_constant__ TensorMaps maps) {
  if (blockIdx.x % kPairBlocks == 0) {
    run_pair_block<T, kHeadDim, 0>(problem, maps);
  } else {
    run_pair_block<T, kHeadDim, 1>(problem, maps);
  }
}

}  // namespace dlattn::backward_sm90
