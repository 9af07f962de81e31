#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

// This file and block.cpp are compiled without instrumentation, so that the scheduler's own
// bookkeeping is no data race; CMake defines SIMT_ASAN or SIMT_TSAN where the rest of the program
// is instrumented.
#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SIMT_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace simt {
namespace {

constexpr std::size_t kStackBytes = 256 << 10;
constexpr std::size_t kGuardBytes = 4096;

#if defined(SIMT_ASAN)
Fiber* left = nullptr;  // by the last switch
#endif

char* allocate_stack() {
  void* memory = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
    std::perror("simt: no memory for a fiber's stack");
    std::_Exit(1);
  }
  return static_cast<char*>(memory) + kGuardBytes;
}

}  // namespace

#if defined(__x86_64__)

// Pushes the callee-saved registers, swaps stacks, pops them.
extern "C" void simt_switch(void** save_stack_pointer, void* load_stack_pointer);
asm(R"(
.text
.globl simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");

namespace {

void prepare(Fiber* fiber, void (*entry)()) {
  constexpr int kSavedRegisters = 6;
  void** top = reinterpret_cast<void**>(fiber->stack + fiber->stack_bytes);
  // `ret` leaves the stack pointer 8 bytes past a multiple of 16, as a call would.
  top -= 2;
  *top = reinterpret_cast<void*>(entry);
  top -= kSavedRegisters;
  std::memset(top, 0, kSavedRegisters * sizeof(void*));
  fiber->stack_pointer = top;
}

void swap(Fiber* from, Fiber* to) {
  simt_switch(&from->stack_pointer, to->stack_pointer);
}

// Below what the ABI lets a function use under its stack pointer: as far down as the fiber has been
// at its switches, and what functions in between may have used. Not by memset, which sanitizers
// take for an access of the scheduler's.
void poison(Fiber* fiber) {
  constexpr std::size_t kRedZone = 128, kBetween = 4 << 10, kMost = 16 << 10;
  char* const top = static_cast<char*>(fiber->stack_pointer);
  const std::size_t used = fiber->lowest ? top - static_cast<char*>(fiber->lowest) : kMost;
  const std::size_t bytes = used + kBetween < kMost ? used + kBetween : kMost;
  fiber->lowest = top;
  void* to = top - kRedZone - bytes;
  std::size_t words = bytes / sizeof(std::uint64_t);
  asm volatile("rep stosq" : "+D"(to), "+c"(words) : "a"(~std::uint64_t{0}) : "memory");
}

}  // namespace

#else

namespace {

ucontext_t* context(Fiber* fiber) {
  if (!fiber->stack_pointer) fiber->stack_pointer = std::calloc(1, sizeof(ucontext_t));
  return static_cast<ucontext_t*>(fiber->stack_pointer);
}

void prepare(Fiber* fiber, void (*entry)()) {
  ucontext_t* c = context(fiber);
  getcontext(c);
  c->uc_stack.ss_sp = fiber->stack;
  c->uc_stack.ss_size = fiber->stack_bytes;
  c->uc_link = nullptr;
  makecontext(c, entry, 0);
}

void swap(Fiber* from, Fiber* to) {
  swapcontext(context(from), context(to));
}

void poison(Fiber*) {}

}  // namespace

#endif

void adopt_current(Fiber* fiber) {
#if defined(SIMT_TSAN)
  fiber->tsan_fiber = __tsan_get_current_fiber();
#else
  (void)fiber;
#endif
}

void make_fiber(Fiber* fiber, void (*entry)()) {
  fiber->stack = allocate_stack();
  fiber->stack_bytes = kStackBytes;
  prepare(fiber, entry);
#if defined(SIMT_TSAN)
  fiber->tsan_fiber = __tsan_create_fiber(0);
#endif
}

void poison_stack(Fiber* fiber) {
  poison(fiber);
}

void finish_first_switch() {
#if defined(SIMT_ASAN)
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  left->stack = const_cast<char*>(static_cast<const char*>(bottom));
  left->stack_bytes = bytes;
#endif
}

void switch_fiber(Fiber* from, Fiber* to) {
#if defined(SIMT_ASAN)
  left = from;
  __sanitizer_start_switch_fiber(&from->asan_fake_stack, to->stack, to->stack_bytes);
#endif
#if defined(SIMT_TSAN)
  __tsan_switch_to_fiber(to->tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
  swap(from, to);
  if (from->stack_pointer < from->lowest) from->lowest = from->stack_pointer;
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(from->asan_fake_stack, nullptr, nullptr);
#endif
}

void tsan_release(void* object) {
#if defined(SIMT_TSAN)
  __tsan_release(object);
#else
  (void)object;
#endif
}

void tsan_acquire(void* object) {
#if defined(SIMT_TSAN)
  __tsan_acquire(object);
#else
  (void)object;
#endif
}

}  // namespace simt
