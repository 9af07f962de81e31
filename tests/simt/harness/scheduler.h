#pragma once

#include <cstddef>
#include <cstdint>

#include "block.h"
#include "fiber.h"

// State that the harness's own files share, which are compiled without instrumentation.
namespace simt::internal {

constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr int kMaxMasks = 64;          // different masks that one warp of one block may use
constexpr std::size_t kGuard = 1024;   // bytes around the dynamic shared memory, and its alignment
constexpr unsigned char kFill = 0xFF;  // NaN in float, half and bfloat16

enum class State {
  kReady,
  kAtBarrier,
  kAtNamedBarrier,
  kAtMbarrier,
  kAtCounter,
  kAtCollective,
  kAtClusterBarrier,
  kDone
};

struct Block;

// The scheduler's state of a thread: first what it looks at for every collective.
struct alignas(64) Worker {
  State state = State::kDone;
  unsigned mask = 0;
  const char* name = "";  // of the barrier or collective it waits at
  void* operand = nullptr;
  Fiber fiber;
  Thread thread;
  Block* block = nullptr;
  int rank = 0;  // of its block in the cluster
  const char* file = "";
  int line = 0;
  Combine combine = nullptr;
  int barrier_id = 0;  // of the bar.sync it waits at, and the number of threads it waits for
  int barrier_count = 0;
  int mbarrier = 0;  // that it waits at, and the parity
  int parity = 0;
  const unsigned* counter = nullptr;  // that it waits for, and the least number
  unsigned least = 0;
  int barriers = 0;  // passed so far
  int cluster_barriers = 0;
  int warp_syncs[kMaxMasks];      // passed so far, by index of the mask
  int registers = 0;              // that it has asked for, 0: not yet
  bool grids_ahead_over = false;  // whether it has waited for them
};

// Addresses that carry happens-before edges. Two of each, used in turn: with one, a thread that is
// late in leaving a barrier would acquire what others released on their way into the next, and
// races would go unseen.
struct SyncObjects {
  long block[2];
  long cluster[2];  // those of its first block
  long named[kNumBarriers][2];
  long mbarriers[kMaxMbarriers][2];
  long tma_units[kMaxMbarriers];
  long warp[kMaxWarps][kMaxMasks][2];
};

struct Mbarrier {
  const void* memory;
  int count;          // arrivals of a phase
  int arrived;        // in this phase
  int promised;       // further ones, that asynchronous copies will bring
  unsigned phase;     // from 0
  long expected;      // bytes that the phase lacks
  long started;       // bytes that copies in flight will bring
  bool fenced;        // whether asynchronous copies see that it is initialised
  SyncObjects* sync;  // of the block whose memory it is in
};

struct Block {
  unsigned char* memory = nullptr;      // guard, shared memory, guard
  unsigned char* async_view = nullptr;  // of the shared memory
  SyncObjects* sync = nullptr;
  Block* next = nullptr;
};

extern Worker* current;  // null: the host runs
extern Block* block;     // that of the thread that runs
extern Launch shape;
extern Mbarrier mbarriers[kMaxMbarriers];  // of the block
extern int num_mbarriers;

// Gives other threads their turn until the scheduler lets this one go on.
void wait(State state, const char* name);

inline bool phase_complete(const Mbarrier& m, int parity) {
  return static_cast<int>(m.phase & 1) != parity;
}
inline bool lacks_promises_alone(const Mbarrier& m) {
  return (m.promised > 0 || m.started > 0) && m.arrived + m.promised == m.count &&
         m.expected == m.started;
}

// At a block's end.
void check_bulk_loads();

}  // namespace simt::internal
