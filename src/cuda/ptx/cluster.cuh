#pragma once

#include <cstdint>

#include "cuda/ptx/smem.cuh"

// Thread block clusters: blocks of a grid that run at one time and read each other's shared memory.
// From compute capability 9.0 on; code for older ones is never launched so.
namespace dlattn::ptx {

// Whether the code that is compiled may be launched in clusters.
#if __CUDA_ARCH__ >= 900
constexpr bool kClusters = true;
#else
constexpr bool kClusters = false;
#endif

// PTX ISA, "Parallel Synchronization and Communication Instructions: barrier.cluster, fence". Waits
// for all threads of all blocks of the cluster. Their stores to shared memory may be loaded then;
// global memory is not ordered. Without the fences that say so, which CUDA has from 12.7 on, it is,
// and threads wait for that.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 7)
  asm volatile(
      "fence.release.sync_restrict::shared::cta.cluster;\n"
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n"
      "fence.acquire.sync_restrict::shared::cluster.cluster;" ::
          : "memory");
#else
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#endif
#endif
}

// The same behind loads from others whose values have been used: a block's shared memory is there
// for them until it has passed this, and may be written again.
__device__ __forceinline__ void cluster_leave() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#endif
}

// PTX ISA, "Data Movement and Conversion Instructions: mapa, ld". Loads from the shared memory of
// block `rank` of the cluster what lies there where `own` is in the caller's.
__device__ __forceinline__ void load_of_block(float (&x)[2], SmemAddress own, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .u32 there; mapa.shared::cluster.u32 there, %2, %3;\n"
      "ld.shared::cluster.v2.f32 {%0, %1}, [there]; }"
      : "=f"(x[0]), "=f"(x[1])
      : "r"(own), "r"(rank)
      : "memory");
#endif
}
__device__ __forceinline__ void load_of_block(float (&x)[4], SmemAddress own, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .u32 there; mapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
      : "r"(own), "r"(rank)
      : "memory");
#endif
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier.arrive", and mapa.
// Arrives at the mbarrier of block `rank` of the cluster that lies there where `own` is in the
// caller's shared memory. Tells that block's copies that what products or loads have read, whose
// values are there, may be overwritten; it orders no writes for the other block's threads. With
// .release.cluster, which would, each arrival waits until the whole GPU sees all of the thread's
// memory accesses (MEMBAR.ALL.GPU).
__device__ __forceinline__ void mbarrier_arrive_at_block(SmemAddress own, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .u32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(own),
      "r"(rank)
      : "memory");
#endif
}

// PTX ISA, "Data Movement and Conversion Instructions: st.async", and mapa. Stores 16 bytes to the
// shared memory of block `rank`, where `own` is in the caller's. They count for its mbarrier, which
// lies there where `own_mbarrier` is in the caller's.
__device__ __forceinline__ void store_at_block(SmemAddress own, const std::uint32_t (&x)[4],
                                               SmemAddress own_mbarrier, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .u32 there, mbarrier;\n"
      "mapa.shared::cluster.u32 there, %0, %6; mapa.shared::cluster.u32 mbarrier, %5, %6;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
      "[there], {%1, %2, %3, %4}, [mbarrier]; }" ::"r"(own),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(own_mbarrier), "r"(rank)
      : "memory");
#endif
}

// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk", and mapa. Copies `bytes` of
// the caller's shared memory to that of block `rank`, where `own` is in the caller's, through the
// async proxy; both at multiples of 16 bytes. They count for its mbarrier, as above, whose phase
// says that they have been read, too.
__device__ __forceinline__ void copy_to_block(SmemAddress own, SmemAddress src, int bytes,
                                              SmemAddress own_mbarrier, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .u32 there, mbarrier;\n"
      "mapa.shared::cluster.u32 there, %0, %4; mapa.shared::cluster.u32 mbarrier, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[there], [%1], %2, [mbarrier]; }" ::"r"(own),
      "r"(src), "r"(bytes), "r"(own_mbarrier), "r"(rank)
      : "memory");
#endif
}

}  // namespace dlattn::ptx
