#pragma once

// Fences between what a thread reads and what other grids have written.
namespace dlattn::ptx {

// PTX ISA, "Parallel Synchronization and Communication Instructions: fence", .acq_rel.gpu. For a
// grid that started early (grid_dependency.cuh), before its wait: what the grids ahead of the one
// ahead have written may be read behind this. Every block of the grid ahead has waited for them, or
// this grid would not have started; and what this SM's first cache has kept from earlier is
// dropped.
__device__ __forceinline__ void see_as_grid_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// PTX ISA, "Data Movement and Conversion Instructions: ld", with .relaxed.gpu. A number that a grid
// ahead may be writing meanwhile: some value that it has had, from L2.
__device__ __forceinline__ int load_relaxed(const int* from) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

}  // namespace dlattn::ptx
