#pragma once

// The gradients of attention on Hopper (compute capability 9.0): wgmma, TMA, mbarriers, warp
// specialisation.
//
// A thread block has 128 keys of one KV head, or 64: a producer warpgroup, one warp of which brings
// the keys and then the queries that see them, and two consumer warpgroups, each of which computes
// dK and dV of 64 keys from start to end, or of half of their columns. It walks the tiles of
// queries that see the keys, of all query heads that share them. Each tile's dQ is added to a sum
// in global memory, in fp32 and in the order of the consumers' registers (dq_part.cuh), which
// nobody has to clear for plain scores and softcap (dq_sender.cuh); convert.cuh finishes it. In
// deterministic kernels, and in others on request, dQ is summed in a fixed order
// (dq_semaphore.cuh). With a bias or a mask the idle warps of the producer's warpgroup bring their
// tiles (score_tiles.cuh). Shared memory: SmemMap, in swizzled tiles. Barriers: an mbarrier "full"
// and one "empty" for each stage of Q and dO (Ring), one for K and V; a named barrier of the
// consumers for dS.

#include "cuda/backward/sm90/consumer.cuh"
#include "cuda/backward/sm90/dq_semaphore.cuh"
#include "cuda/backward/sm90/dq_sender.cuh"
#include "cuda/backward/sm90/late_consumer.cuh"
#include "cuda/backward/sm90/producer.cuh"
#include "cuda/backward/sm90/score_tiles.cuh"
#include "cuda/backward/sm90/wide_consumer.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/registers.cuh"

namespace dlattn::backward_sm90 {

template <typename T, int kHeadDim, bool kSoftcap, bool kInOrder, bool kScoreMod = false,
          bool kIsLate = false>
__device__ __forceinline__ void run_block(const Problem& problem, const TensorMaps& maps) {
  constexpr Registers kRegisters = registers_of(kHeadDim, kScoreMod);
  constexpr bool kSendsDq = !is_wide(kHeadDim) && !kInOrder && !kScoreMod && !kIsLate;
  const Shared<kHeadDim, kSoftcap> shared(ptx::smem_address(ptx::dynamic_smem()));
  if (threadIdx.x == 0) {
    if (kInOrder || kScoreMod) shared.init_semaphore();
    if (kScoreMod) shared.init_score_tiles(kNumCopiers);
    if (kIsLate) shared.init_late();
    if (kSendsDq) shared.init_dq();
    shared.init();
  }
  if (threadIdx.x == 32) maps.prefetch();
  const bool in_order = kInOrder || (kScoreMod && problem.tickets);
  // Before the wait where no memory is read: for the grid ahead to hide.
  const bool reads_memory = in_order || problem.cu_seqlens_q;
  if (reads_memory) ptx::wait_for_grids_ahead();
  if (threadIdx.x == 0 && blockIdx.x < problem.num_blocks) {
    const unsigned index = in_order ? ptx::take_ticket(problem.tickets) : blockIdx.x;
    shared.work() = typename Shared<kHeadDim, kSoftcap>::BlockWork(problem, index, in_order);
  }
  if (!reads_memory) ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  if (blockIdx.x >= problem.num_blocks) return;
  __syncthreads();
  if (!shared.work().has_rows()) return;
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::lower_registers<kRegisters.producer>();
    if (threadIdx.x >= 32) {
      if constexpr (kScoreMod) {
        if (problem.score_mod.has_tiles()) return copy_score_tiles<T>(problem, shared);
      }
      if constexpr (kSendsDq) {
        DqSender<kHeadDim, kSoftcap>{problem, shared}.run();
      } else {
        if (in_order) walk_semaphore(problem, shared);
      }
      return;
    }
    if (problem.cu_seqlens_q) {
      produce<true, false>(problem, maps, shared);
    } else {
      produce<false, kScoreMod>(problem, maps, shared);
    }
  } else {
    ptx::raise_registers<kRegisters.consumer>();
    // The same in all lanes, and by this the compiler knows.
    const int warpgroup =
        __shfl_sync(tile::kFullMask, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    using Other = std::conditional_t<is_wide(kHeadDim),
                                     WideConsumer<T, kHeadDim, kSoftcap, kInOrder, kScoreMod>,
                                     Consumer<T, kHeadDim, kSoftcap, kInOrder, kScoreMod>>;
    using Own = std::conditional_t<kIsLate, LateConsumer<T, kHeadDim>, Other>;
    Own(problem, shared, warpgroup - 1).run();
  }
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    plain_kernel(const __grid_constant__ Problem problem, const __grid_constant__ TensorMaps maps) {
  run_block<T, kHeadDim, false, false>(problem, maps);
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    late_kernel(const __grid_constant__ Problem problem, const __grid_constant__ TensorMaps maps) {
  run_block<T, kHeadDim, false, false, false, true>(problem, maps);
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    softcap_kernel(const __grid_constant__ Problem problem,
                   const __grid_constant__ TensorMaps maps) {
  run_block<T, kHeadDim, true, false>(problem, maps);
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    deterministic_kernel(const __grid_constant__ Problem problem,
                         const __grid_constant__ TensorMaps maps) {
  run_block<T, kHeadDim, false, true>(problem, maps);
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    deterministic_softcap_kernel(const __grid_constant__ Problem problem,
                                 const __grid_constant__ TensorMaps maps) {
  run_block<T, kHeadDim, true, true>(problem, maps);
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    score_mod_kernel(const __grid_constant__ Problem problem,
                     const __grid_constant__ TensorMaps maps) {
  run_block<T, kHeadDim, false, false, true>(problem, maps);
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    score_mod_softcap_kernel(const __grid_constant__ Problem problem,
                             const __grid_constant__ TensorMaps maps) {
  run_block<T, kHeadDim, true, false, true>(problem, maps);
}

}  // namespace dlattn::backward_sm90
