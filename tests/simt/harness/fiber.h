#pragma once

#include <cstddef>

// Fibers: stacks that are switched between by hand, known to AddressSanitizer and ThreadSanitizer.
// To ThreadSanitizer every fiber is a thread of its own, and a switch orders nothing.
namespace simt {

struct Fiber {
  void* stack_pointer = nullptr;
  void* lowest =
      nullptr;            // stack pointer at a switch since its stack was poisoned; null: all of it
  char* stack = nullptr;  // lowest address
  std::size_t stack_bytes = 0;
  void* asan_fake_stack = nullptr;
  void* tsan_fiber = nullptr;
};

// Adopts the stack that runs now.
void adopt_current(Fiber* fiber);

// Makes a fiber that will run `entry`, which must never return. It lives as long as the process.
void make_fiber(Fiber* fiber, void (*entry)());

// Fills what a fiber that does not run will use of its stack with bytes that are NaN as floats, so
// that what its next function leaves uninitialised is not what an earlier one has left there.
void poison_stack(Fiber* fiber);

// The first thing that `entry` does: completes the switch that led to it.
void finish_first_switch();

// Saves the running fiber in `from` and runs `to`. Returns when somebody switches back to `from`.
void switch_fiber(Fiber* from, Fiber* to);

// Happens-before edges for ThreadSanitizer; nothing in other builds.
void tsan_release(void* object);
void tsan_acquire(void* object);

}  // namespace simt
