// The scheduler. Compiled without instrumentation, and free of the standard library's containers,
// whose instrumented copies the linker might choose instead.
#include "block.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "scheduler.h"

#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace simt {

using namespace internal;

namespace internal {

Worker* current = nullptr;
Block* block = nullptr;
Launch shape;

}  // namespace internal

namespace {

Worker workers[kMaxThreads];
int num_made = 0;
int num_threads = 0;  // of the blocks that run at once, as are the warps
int num_warps = 0;
int block_threads = 0;
int num_blocks = 0;  // that run at once
Block* blocks[kMaxWarps];
Block* all_blocks = nullptr;  // of the launch
unsigned masks[kMaxWarps][kMaxMasks];
int num_masks[kMaxWarps];
// For each bar.sync: how often it has let its threads go on, the threads that have arrived at it
// without waiting since, by warp, and how many they ask for. By block of the cluster.
int openings[kMaxWarps][kNumBarriers];
int arrived[kNumBarriers][kMaxWarps];
int arrived_count[kMaxWarps][kNumBarriers];
int num_at_mbarriers = 0;  // threads that wait
int num_at_counters = 0;
bool came_to_barrier = false;  // a thread, since it was last looked which of them may open

Fiber host;
void (*thread_body)(void*) = nullptr;
void* thread_context = nullptr;
long launch_begin = 0;  // sync objects
long launch_end = 0;
Fiber ahead;
bool made_ahead = false;
long ahead_end = 0;

// xorshift64*: a generator whose sequences are the same everywhere.
struct Random {
  std::uint64_t state;
  unsigned below(unsigned n) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return static_cast<unsigned>((state * 2685821657736338717ull) >> 33) % n;
  }
  void shuffle(int* items, int n) {
    for (int i = n - 1; i > 0; --i) {
      const int j = static_cast<int>(below(i + 1)), item = items[i];
      items[i] = items[j], items[j] = item;
    }
  }
};

// Lanes that have their turn one after the other, each handing over to the next.
struct Turn {
  const int* lanes;  // of a warp, in order
  int first_thread;  // of the warp
  int next;
} turn;

// The next lane that can go on, which runs from here on; null: none, and the host runs.
Worker* take_turn() {
  current = nullptr;
  while (turn.next < kWarpSize && !current) {
    const int thread = turn.first_thread + turn.lanes[turn.next++];
    if (thread < num_threads && workers[thread].state == State::kReady) current = &workers[thread];
  }
  if (current) block = current->block;
  return current;
}

void hand_over() {
  Worker* me = current;
  Worker* next = take_turn();
  switch_fiber(&me->fiber, next ? &next->fiber : &host);
}

void fiber_entry() {
  finish_first_switch();
  for (;;) {
    tsan_acquire(&launch_begin);
    thread_body(thread_context);
    tsan_release(&launch_end);
    current->state = State::kDone;
    hand_over();
  }
}

void ahead_entry() {
  finish_first_switch();
  for (;;) {
    tsan_acquire(&launch_begin);
    shape.grid_ahead(shape.grid_ahead_context);
    tsan_release(&ahead_end);
    switch_fiber(&ahead, &host);
  }
}

// On a fiber of its own, which nothing but the threads' wait orders before them.
void run_grid_ahead() {
  if (!made_ahead) make_fiber(&ahead, ahead_entry);
  made_ahead = true;
  tsan_release(&launch_begin);
  switch_fiber(&host, &ahead);
}

void describe(const Worker& w) {
  if (w.state == State::kDone) {
    std::fprintf(stderr, "  thread %u has ended\n", w.thread.thread_idx.x);
  } else {
    std::fprintf(stderr, "  thread %u waits at %s", w.thread.thread_idx.x, w.name);
    if (w.state == State::kAtBarrier) std::fprintf(stderr, " (%s:%d)", w.file, w.line);
    if (w.state == State::kAtCollective) std::fprintf(stderr, " with mask %08x", w.mask);
    if (w.state == State::kAtNamedBarrier)
      std::fprintf(stderr, " %d of %d threads", w.barrier_id, w.barrier_count);
    if (w.state == State::kAtMbarrier) {
      const Mbarrier& m = mbarriers[w.mbarrier];
      std::fprintf(stderr, " %d for parity %d: phase %u has %d of %d arrivals", w.mbarrier,
                   w.parity, m.phase, m.arrived, m.count);
      if (m.expected != 0 || m.started != 0)
        std::fprintf(stderr, ", lacks %ld bytes, %ld on their way", m.expected, m.started);
    }
    if (w.state == State::kAtCounter)
      std::fprintf(stderr, " to be %u, which is %u", w.least, *w.counter);
    std::fprintf(stderr, "\n");
  }
}

bool same_text(const char* a, const char* b) {
  return a == b || std::strcmp(a, b) == 0;
}

bool same_place(const Worker& a, const Worker& b) {
  if (a.state != b.state) return false;
  if (a.state == State::kAtBarrier) return a.line == b.line && same_text(a.file, b.file);
  if (a.state == State::kAtNamedBarrier)
    return a.barrier_id == b.barrier_id && a.barrier_count == b.barrier_count;
  if (a.state == State::kAtMbarrier) return a.mbarrier == b.mbarrier && a.parity == b.parity;
  if (a.state == State::kAtCounter) return a.counter == b.counter && a.least == b.least;
  if (a.state == State::kAtCollective) return a.mask == b.mask && same_text(a.name, b.name);
  return true;
}

[[noreturn]] void die_stuck(const char* why) {
  std::fprintf(stderr, "simt: %s\n", why);
  for (int i = 0; i < num_threads; ++i) {  // the first of each run of threads at the same place
    if (i == 0 || !same_place(workers[i], workers[i - 1])) describe(workers[i]);
  }
  std::fflush(nullptr);
  std::_Exit(1);
}

// Lets the lanes go on that wait at a collective which all of its mask have reached.
bool complete_collectives(int warp) {
  Worker* lanes = workers + warp * kWarpSize;
  const int num_lanes =
      num_threads - warp * kWarpSize < kWarpSize ? num_threads - warp * kWarpSize : kWarpSize;
  bool progress = false;
  for (int i = 0; i < num_lanes; ++i) {
    if (lanes[i].state != State::kAtCollective) continue;
    unsigned arrived = 0;
    void* operands[kWarpSize] = {};
    for (int j = 0; j < num_lanes; ++j) {
      if (!same_place(lanes[i], lanes[j])) continue;
      arrived |= 1u << j;
      operands[j] = lanes[j].operand;
    }
    if (arrived != lanes[i].mask) continue;
    if (lanes[i].combine) {
      current = &lanes[i];  // whose thread an error message names
      block = current->block;
      lanes[i].combine(operands, arrived);
      current = nullptr;
    }
    for (int j = 0; j < num_lanes; ++j) {
      if (arrived >> j & 1) lanes[j].state = State::kReady;
    }
    progress = true;
  }
  return progress;
}

// The threads of a block of the cluster: from which on, and before which.
int first_of(int rank) {
  return rank * block_threads;
}

// Lets the threads of a block go on that wait at a bar.sync which as many as it asks for have
// reached.
bool complete_barriers(int rank) {
  const int first = first_of(rank), end = first_of(rank + 1);
  int lanes[kNumBarriers][kMaxWarps], count[kNumBarriers], all[kNumBarriers] = {};
  std::memcpy(lanes, arrived, sizeof lanes);
  std::memcpy(count, arrived_count[rank], sizeof count);
  for (int i = first; i < end; ++i) {
    const Worker& w = workers[i];
    if (w.state != State::kAtNamedBarrier) continue;
    if (count[w.barrier_id] == 0) count[w.barrier_id] = w.barrier_count;
    if (count[w.barrier_id] != w.barrier_count)
      die_stuck("threads that meet at one bar.sync ask for different numbers of threads");
    ++lanes[w.barrier_id][w.thread.warp];
  }
  bool progress = false;
  for (int id = 0; id < kNumBarriers; ++id) {
    const int first_warp = first / kWarpSize, end_warp = (end + kWarpSize - 1) / kWarpSize;
    for (int warp = first_warp; warp < end_warp; ++warp) all[id] += lanes[id][warp];
    if (all[id] == 0 || all[id] < count[id]) continue;
    if (all[id] > count[id]) die_stuck("more threads meet at a bar.sync than it asks for");
    for (int warp = first_warp; warp < end_warp; ++warp) {
      if (lanes[id][warp] % kWarpSize != 0) die_stuck("a bar.sync of a part of a warp");
    }
    for (int i = first; i < end; ++i) {
      Worker& w = workers[i];
      if (w.state == State::kAtNamedBarrier && w.barrier_id == id) w.state = State::kReady;
    }
    for (int warp = first_warp; warp < end_warp; ++warp) arrived[id][warp] = 0;
    arrived_count[rank][id] = 0;
    ++openings[rank][id];
    progress = true;
  }
  return progress;
}

bool complete_barriers() {
  if (!came_to_barrier) return false;
  came_to_barrier = false;
  bool progress = false;
  for (int rank = 0; rank < num_blocks; ++rank) progress |= complete_barriers(rank);
  return progress;
}

// Lets the threads of a warp go on that wait for a phase which is complete, or which they complete.
bool pass_mbarriers(int warp) {
  bool progress = false;
  if (num_at_mbarriers == 0) return progress;
  for (int i = warp * kWarpSize; i < num_threads && i < (warp + 1) * kWarpSize; ++i) {
    Worker& w = workers[i];
    if (w.state != State::kAtMbarrier) continue;
    const Mbarrier& m = mbarriers[w.mbarrier];
    if (!phase_complete(m, w.parity) && !lacks_promises_alone(m)) continue;
    w.state = State::kReady;
    --num_at_mbarriers;
    progress = true;
  }
  return progress;
}

// Lets the threads of a warp go on that wait for a counter which is as high as they ask for.
bool pass_counters(int warp) {
  bool progress = false;
  if (num_at_counters == 0) return progress;
  for (int i = warp * kWarpSize; i < num_threads && i < (warp + 1) * kWarpSize; ++i) {
    Worker& w = workers[i];
    if (w.state != State::kAtCounter || *w.counter < w.least) continue;
    w.state = State::kReady;
    --num_at_counters;
    progress = true;
  }
  return progress;
}

bool run_lanes(int warp, const int* lane_order) {
  turn = {lane_order, warp * kWarpSize, 0};
  Worker* first = take_turn();
  if (first) switch_fiber(&host, &first->fiber);
  return first != nullptr;
}

// Runs all threads until each has ended or waits at a barrier.
void run_to_barrier(Random* random) {
  int warp_order[kMaxWarps], lane_order[kWarpSize];
  const bool reversed = shape.schedule == 1, shuffled = shape.schedule > 1;
  const bool one_step = shuffled && shape.schedule % 2 == 1;
  for (int i = 0; i < num_warps; ++i) warp_order[i] = reversed ? num_warps - 1 - i : i;
  for (int i = 0; i < kWarpSize; ++i) lane_order[i] = reversed ? kWarpSize - 1 - i : i;
  for (bool progress = true; progress;) {
    progress = false;
    if (shuffled) random->shuffle(warp_order, num_warps);
    for (int i = 0; i < num_warps; ++i) {
      for (bool again = true; again;) {
        if (shuffled) random->shuffle(lane_order, kWarpSize);
        again = pass_mbarriers(warp_order[i]);
        again |= pass_counters(warp_order[i]);
        again |= run_lanes(warp_order[i], lane_order);
        again |= complete_collectives(warp_order[i]);
        again |= complete_barriers();
        progress |= again;
        if (one_step) break;
      }
    }
  }
}

// How many threads of a block of the cluster are in a state.
int count_of(int rank, State state) {
  int count = 0;
  for (int i = first_of(rank); i < first_of(rank + 1); ++i) count += workers[i].state == state;
  return count;
}

// Whether all threads of a block wait at its barrier, which then opens.
bool pass_barrier(int rank) {
  const int ended = count_of(rank, State::kDone), waiting = count_of(rank, State::kAtBarrier);
  if (waiting == 0) return false;
  if (ended + waiting == block_threads && ended > 0)
    die_stuck("__syncthreads after some threads of the block have ended");
  if (waiting < block_threads) die_stuck("a collective or barrier that some threads never reach");
  for (int i = first_of(rank); i < first_of(rank + 1); ++i) {
    if (!same_place(workers[first_of(rank)], workers[i]))
      die_stuck("threads of the block wait at different __syncthreads");
  }
  for (int i = first_of(rank); i < first_of(rank + 1); ++i) workers[i].state = State::kReady;
  return true;
}

// All threads have ended (true), or all of a block wait at its barrier, or all at the cluster's,
// which then opens (false).
bool pass_barriers() {
  int ended = 0, waiting = 0;
  bool passed = false;
  for (int rank = 0; rank < num_blocks; ++rank) {
    passed |= pass_barrier(rank);
    const int of_block = count_of(rank, State::kDone);
    ended += of_block;
    waiting += count_of(rank, State::kAtClusterBarrier);
    if (of_block < block_threads) continue;
    for (const int count : arrived_count[rank]) {
      if (count != 0) die_stuck("threads arrived at a bar.sync that never opened");
    }
  }
  if (passed) return false;
  if (ended == num_threads) return true;
  if (ended + waiting == num_threads && ended > 0)
    die_stuck("a barrier of the cluster after some of its threads have ended");
  if (waiting < num_threads) die_stuck("a collective or barrier that some threads never reach");
  for (int i = 0; i < num_threads; ++i) workers[i].state = State::kReady;
  return false;
}

Block* make_block() {
  Block* made = static_cast<Block*>(std::calloc(1, sizeof(Block)));
  made->sync = static_cast<SyncObjects*>(std::calloc(1, sizeof(SyncObjects)));
  const std::size_t whole = (shape.smem_bytes + kGuard - 1) / kGuard * kGuard + 2 * kGuard;
  made->memory = static_cast<unsigned char*>(std::aligned_alloc(kGuard, whole));
  std::memset(made->memory, kFill, whole);
  made->async_view = static_cast<unsigned char*>(std::malloc(shape.smem_bytes + 1));
  std::memset(made->async_view, kFill, shape.smem_bytes);
#if defined(SIMT_ASAN)
  __asan_poison_memory_region(made->memory, kGuard);
  const std::size_t end = kGuard + shape.smem_bytes;
  __asan_poison_memory_region(made->memory + end, whole - end);
#endif
  return made;
}

void check_guards([[maybe_unused]] const Block* of) {
#if !defined(SIMT_ASAN)
  const unsigned char* after = of->memory + kGuard + shape.smem_bytes;
  for (std::size_t i = 0; i < kGuard; ++i) {
    if (of->memory[i] != kFill || after[i] != kFill) {
      std::fprintf(stderr, "simt: a write outside the %zu bytes of dynamic shared memory\n",
                   shape.smem_bytes);
      std::_Exit(1);
    }
  }
#endif
}

void free_block(Block* old) {
#if defined(SIMT_ASAN)
  const std::size_t whole = (shape.smem_bytes + kGuard - 1) / kGuard * kGuard + 2 * kGuard;
  __asan_unpoison_memory_region(old->memory, whole);
#endif
  std::free(old->memory);
  std::free(old->async_view);
  std::free(old->sync);
  std::free(old);
}

void prepare_workers() {
  for (; num_made < num_threads; ++num_made) make_fiber(&workers[num_made].fiber, fiber_entry);
  std::memset(num_masks, 0, sizeof num_masks);
  num_mbarriers = 0;
  std::memset(openings, 0, sizeof openings);
  std::memset(arrived, 0, sizeof arrived);
  std::memset(arrived_count, 0, sizeof arrived_count);
}

void prepare_worker(int i, unsigned first_block) {
  Worker& w = workers[i];
  const unsigned x = shape.block.x, y = shape.block.y, gx = shape.grid.x, gy = shape.grid.y;
  w.rank = i / block_threads;
  w.block = blocks[w.rank];
  const unsigned of_block = i % block_threads, n = first_block + w.rank;
  w.thread.thread_idx = dim3(of_block % x, of_block / x % y, of_block / (x * y));
  w.thread.block_idx = dim3(n % gx, n / gx % gy, n / (gx * gy));
  w.thread.block_dim = shape.block;
  w.thread.grid_dim = shape.grid;
  w.thread.index = i;
  w.thread.warp = i / kWarpSize;
  w.thread.lane = i % kWarpSize;
  w.state = State::kReady;
  w.name = "";
  w.barriers = 0;
  w.cluster_barriers = 0;
  w.registers = 0;
  w.grids_ahead_over = shape.grid_ahead == nullptr;
  std::memset(w.warp_syncs, 0, sizeof w.warp_syncs);
  poison_stack(&w.fiber);
}

// setmaxnreg waits for registers that others give back; more than those of the launch never come.
void check_registers() {
  constexpr int kRegisters = 65536, kGranularity = 8, kGroup = 4 * kWarpSize;
  const int at_launch = kRegisters / block_threads / kGranularity * kGranularity;
  int all = 0;
  bool asked = false;
  for (int i = 0; i < num_threads; ++i) {
    const int registers = workers[i].registers;
    if (registers != workers[i / kGroup * kGroup].registers)
      die("the warps of a warpgroup ask for different numbers of registers");
    all += registers ? registers : at_launch;
    asked |= registers != 0;
  }
  if (asked && all > at_launch * num_threads)
    die("setmaxnreg asks for %d registers, the block has %d", all, at_launch * num_threads);
}

// Else the grid might be over before the one ahead of it, and the next one start too early.
void check_order_of_grids() {
  for (int i = 0; i < num_threads; ++i) {
    if (!workers[i].grids_ahead_over)
      die_stuck("a thread has ended without waiting for the grids ahead");
  }
}

// A cluster of blocks, from one of that number on.
void run_blocks(unsigned first, Random* random) {
  for (int rank = 0; rank < num_blocks; ++rank) {
    blocks[rank] = make_block();
    blocks[rank]->next = all_blocks;
    all_blocks = blocks[rank];
  }
  prepare_workers();
  for (int i = 0; i < num_threads; ++i) prepare_worker(i, first);
  tsan_release(&launch_begin);
  do {
    run_to_barrier(random);
  } while (!pass_barriers());
  for (int rank = 0; rank < num_blocks; ++rank) check_guards(blocks[rank]);
  check_registers();
  check_order_of_grids();
  check_bulk_loads();
}

int index_of_mask(int warp, unsigned mask) {
  int i = 0;
  while (i < num_masks[warp] && masks[warp][i] != mask) ++i;
  if (i == kMaxMasks) die("more than %d different masks in a warp", kMaxMasks);
  if (i == num_masks[warp]) masks[warp][num_masks[warp]++] = mask;
  return i;
}

void check_barrier(int id, int count) {
  if (id < 1 || id >= kNumBarriers) die("bar.sync %d; 1 to %d are free", id, kNumBarriers - 1);
  if (count < kWarpSize || count % kWarpSize != 0)
    die("bar.sync of %d threads, which is not a number of warps", count);
}

}  // namespace

namespace internal {

void wait(State state, const char* name) {
  current->state = state;
  current->name = name;
  if (state == State::kAtMbarrier) ++num_at_mbarriers;
  if (state == State::kAtCounter) ++num_at_counters;
  hand_over();
}

}  // namespace internal

const Thread& this_thread() {
  return current->thread;
}

unsigned char* dynamic_smem() {
  return block->memory + kGuard;
}

int num_block_threads() {
  return block_threads;
}

unsigned char* smem_of_block(const void* own, unsigned rank) {
  if (static_cast<int>(rank) >= num_blocks) die("block %u of a cluster of %d", rank, num_blocks);
  if (count_of(static_cast<int>(rank), State::kDone) > 0)
    die("shared memory of block %u of the cluster, some of whose threads have ended", rank);
  return blocks[rank]->memory + (static_cast<const unsigned char*>(own) - block->memory);
}

void as_block(unsigned rank, void (*run)(void*), void* context) {
  smem_of_block(dynamic_smem(), rank);  // which is there
  Block* const own = block;
  block = blocks[rank];
  run(context);
  block = own;
}

int num_cluster_blocks() {
  return num_blocks;
}

bool in_dynamic_smem(const void* memory, std::size_t bytes) {
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(dynamic_smem());
  return first >= begin && first + bytes <= begin + shape.smem_bytes;
}

void die(const char* format, ...) {
  std::fprintf(stderr, "simt: ");
  va_list args;
  va_start(args, format);
  std::vfprintf(stderr, format, args);
  va_end(args);
  if (current) {
    const Thread& t = current->thread;
    std::fprintf(stderr, " (block %u,%u,%u thread %u)", t.block_idx.x, t.block_idx.y, t.block_idx.z,
                 t.thread_idx.x);
  }
  std::fprintf(stderr, "\n");
  std::fflush(nullptr);
  std::_Exit(1);
}

void sync_threads(const char* file, int line) {
  Worker* me = current;
  long* object = &block->sync->block[me->barriers++ & 1];
  me->file = file;
  me->line = line;
  tsan_release(object);
  wait(State::kAtBarrier, "__syncthreads");
  tsan_acquire(object);
}

void sync_cluster() {
  Worker* me = current;
  long* object = &blocks[0]->sync->cluster[me->cluster_barriers++ & 1];
  tsan_release(object);
  wait(State::kAtClusterBarrier, "barrier.cluster");
  tsan_acquire(object);
}

void sync_barrier(int id, int count) {
  check_barrier(id, count);
  Worker* me = current;
  long* object = &block->sync->named[id][openings[me->rank][id] & 1];
  me->barrier_id = id;
  me->barrier_count = count;
  tsan_release(object);
  came_to_barrier = true;
  wait(State::kAtNamedBarrier, "bar.sync");
  tsan_acquire(object);
}

void arrive_at_barrier(int id, int count) {
  check_barrier(id, count);
  int& asked = arrived_count[current->rank][id];
  if (asked != 0 && asked != count)
    die_stuck("threads that meet at one bar.sync ask for different numbers of threads");
  tsan_release(&block->sync->named[id][openings[current->rank][id] & 1]);
  asked = count;
  ++arrived[id][current->thread.warp];
  came_to_barrier = true;
}

void wait_for_grids_ahead() {
  current->grids_ahead_over = true;
  tsan_acquire(&ahead_end);
}

bool grids_ahead_are_over() {
  return current->grids_ahead_over;
}

void check_global_access() {
  if (!current->grids_ahead_over)
    die("an access to global memory before the wait for the grids ahead");
}

void let_next_grid_start() {
  if (!current->grids_ahead_over)
    die("griddepcontrol.launch_dependents before griddepcontrol.wait");
}

void wait_for_counter(const unsigned* counter, unsigned least) {
  current->counter = counter;
  current->least = least;
  wait(State::kAtCounter, "a counter");
}

void set_max_registers(int count, bool increase) {
  Worker* me = current;
  if (me->registers != 0 && (count > me->registers) != increase)
    die("setmaxnreg.%s from %d to %d", increase ? "inc" : "dec", me->registers, count);
  me->registers = count;
}

void warp_collective(const char* name, unsigned mask, Combine combine, void* operand) {
  Worker* me = current;
  if (!(mask >> me->thread.lane & 1))
    die("%s with mask %08x, which leaves out the calling lane", name, mask);
  me->mask = mask;
  me->combine = combine;
  me->operand = operand;
  wait(State::kAtCollective, name);
}

void sync_warp(unsigned mask) {
  ordering_collective("__syncwarp", mask, nullptr, nullptr);
}

void ordering_collective(const char* name, unsigned mask, Combine combine, void* operand) {
  Worker* me = current;
  const int warp = me->thread.warp, which = index_of_mask(warp, mask);
  long* object = &block->sync->warp[warp][which][me->warp_syncs[which]++ & 1];
  tsan_release(object);
  warp_collective(name, mask, combine, operand);
  tsan_acquire(object);
}

void run(const Launch& launch, void (*body)(void*), void* context) {
  shape = launch;
  block_threads = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  if (block_threads < 1 || block_threads > kMaxThreads) die("a block of %d threads", block_threads);
  num_blocks = static_cast<int>(launch.cluster_size);
  num_threads = num_blocks * block_threads;
  const unsigned x = launch.grid.x, y = launch.grid.y, count = x * y * launch.grid.z;
  if (num_blocks > 1 && (num_threads > kMaxThreads || block_threads % kWarpSize != 0 ||
                         count != x || count % launch.cluster_size != 0))
    die("clusters of %d blocks of %d threads in a grid of %u", num_blocks, block_threads, count);
  num_warps = (num_threads + kWarpSize - 1) / kWarpSize;
  thread_body = body;
  thread_context = context;
  adopt_current(&host);
  if (launch.grid_ahead) run_grid_ahead();
  Random random{0x9E3779B97F4A7C15ull ^ launch.schedule};
  const unsigned clusters = count / launch.cluster_size;
  for (unsigned n = 0; n < clusters; ++n)
    run_blocks((launch.schedule == 1 ? clusters - 1 - n : n) * launch.cluster_size, &random);
  tsan_acquire(&launch_end);
  while (all_blocks) {
    Block* next = all_blocks->next;
    free_block(all_blocks);
    all_blocks = next;
  }
}

}  // namespace simt
