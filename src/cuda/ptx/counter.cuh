#pragma once

// Numbers in global memory by which thread blocks of a grid agree on an order.
namespace dlattn::ptx {

// PTX ISA, "Parallel Synchronization and Communication Instructions: atom", with .add. Adds 1 and
// returns the number before: every thread that asks gets another one. Orders no memory.
__device__ __forceinline__ unsigned take_ticket(unsigned* counter) {
  unsigned ticket;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(ticket)
               : "l"(counter)
               : "memory");
  return ticket;
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: red", with .release and .max.
// Raises a counter to `x`, where it is less; releases what the thread has done, and what it has
// acquired of others.
__device__ __forceinline__ void raise_counter(unsigned* counter, unsigned x) {
  asm volatile("red.release.gpu.global.max.u32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

// The same with .add: raises it by `x`.
__device__ __forceinline__ void raise_counter_by(unsigned* counter, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

// PTX ISA, "Data Movement and Conversion Instructions: ld", with .acquire. Waits until a counter is
// at least `x`, and acquires what was released by those that raised it.
__device__ __forceinline__ void wait_for_counter(const unsigned* counter, unsigned x) {
  unsigned now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now < x);
}

}  // namespace dlattn::ptx
