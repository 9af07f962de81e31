#pragma once

namespace dlattn::ptx {

// PTX ISA, "Miscellaneous Instructions: setmaxnreg". Sets how many registers each thread of the
// warp may use, a multiple of 8 from 24 to 256; all warps of a warpgroup do it alike. Raising waits
// until the thread block's pool, what its threads had at launch, has enough given back. The
// compiler heeds it only in kernels with __launch_bounds__(threads, 1).
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The same section: gives registers back to the pool.
template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace dlattn::ptx
