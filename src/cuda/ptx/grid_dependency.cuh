#pragma once

// Programmatic dependent launch: a grid launched so may start before the one ahead of it in its
// stream is over. In a grid launched otherwise, and before compute capability 9.0, both do nothing.
namespace dlattn::ptx {

// Whether code that is compiled so may start before the grid ahead is over.
#if __CUDA_ARCH__ >= 900
constexpr bool kStartsEarly = true;
#else
constexpr bool kStartsEarly = false;
#endif

// PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol", .wait. Waits
// until the grids ahead are complete and all that they have written is visible.
__device__ __forceinline__ void wait_for_grids_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same section, .launch_dependents. Lets the next grid start once every block of this one has
// called it or ended. It orders no memory: the next grid's wait does. After the wait, so that only
// two grids overlap.
__device__ __forceinline__ void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The same before the wait, which must still come: else this grid might end before those ahead, and
// with it the next one's wait. For a grid of few and small blocks behind one that fills the device:
// the blocks of the third are then in place when the second ends.
__device__ __forceinline__ void let_next_grid_start_before_wait() {
  let_next_grid_start();
}

}  // namespace dlattn::ptx
