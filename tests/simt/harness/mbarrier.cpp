// mbarriers, the TMA units that bring them bytes, and the asynchronous proxy's view of shared
// memory.
#include <cstring>

#include "scheduler.h"

namespace simt {

using namespace internal;

namespace internal {

Mbarrier mbarriers[kMaxMbarriers];
int num_mbarriers = 0;

}  // namespace internal

namespace {

Fiber tma_units[kMaxMbarriers];
BulkLoads bulk_loads[kMaxMbarriers];

void end_phase_if_complete(Mbarrier* m) {
  if (m->arrived < m->count || m->expected != 0) return;
  m->arrived = 0;
  ++m->phase;
}

// A copy that a TMA unit has to make for the current thread.
struct CopyJob {
  int mbarrier;
  void (*complete)(const BulkLoads& loads);
} copy_job;

void tma_entry() {
  finish_first_switch();
  for (;;) {
    const int i = copy_job.mbarrier;
    tsan_acquire(&mbarriers[i].sync->tma_units[i]);
    copy_job.complete(bulk_loads[i]);
    tsan_release(&mbarriers[i].sync->mbarriers[i][mbarriers[i].phase & 1]);
    switch_fiber(&tma_units[i], &current->fiber);
  }
}

int find_mbarrier(const void* memory, const char* what) {
  for (int i = 0; i < num_mbarriers; ++i) {
    if (mbarriers[i].memory == memory) return i;
  }
  die("%s of an mbarrier that is not initialised", what);
}

// Once all have arrived, nothing can raise the number of bytes any more.
void check_bytes(const Mbarrier& m) {
  if (m.arrived == m.count && m.started > m.expected)
    die("copies bring %ld bytes to an mbarrier that expects %ld", m.started, m.expected);
}

}  // namespace

namespace internal {

void check_bulk_loads() {
  for (int i = 0; i < num_mbarriers; ++i) {
    if (bulk_loads[i].count != 0)
      die("the block ends with %d bulk loads that nobody waited for", bulk_loads[i].count);
  }
}

}  // namespace internal

void mbarrier_init(void* memory, int count) {
  if (reinterpret_cast<std::uintptr_t>(memory) % 8 != 0) die("an mbarrier at %p", memory);
  if (!in_dynamic_smem(memory, 8)) die("an mbarrier outside shared memory");
  if (count < 1) die("an mbarrier of %d arrivals", count);
  if (num_mbarriers == kMaxMbarriers) die("more than %d mbarriers", kMaxMbarriers);
  mbarriers[num_mbarriers++] = {memory, count, 0, 0, 0, 0, 0, false, block->sync};
}

void mbarrier_arrive(void* memory) {
  const int i = find_mbarrier(memory, "an arrival");
  Mbarrier& m = mbarriers[i];
  if (m.arrived == m.count) die("more arrivals than the mbarrier's phase takes");
  tsan_release(&mbarriers[i].sync->mbarriers[i][m.phase & 1]);
  ++m.arrived;
  check_bytes(m);
  end_phase_if_complete(&m);
}

void mbarrier_expect(void* memory, std::uint32_t bytes) {
  constexpr long kMost = (1 << 20) - 1;
  Mbarrier& m = mbarriers[find_mbarrier(memory, "an expect_tx")];
  if (m.arrived == m.count) die("an expect_tx after the mbarrier's last arrival");
  m.expected += bytes;
  if (m.expected > kMost) die("an mbarrier that expects %ld bytes", m.expected);
}

void mbarrier_start_bytes(void* memory, std::uint32_t bytes) {
  Mbarrier& m = mbarriers[find_mbarrier(memory, "a copy's completion")];
  if (!m.fenced) die("a copy to an mbarrier without a fence after its initialisation");
  m.started += bytes;
  check_bytes(m);
}

void mbarrier_complete_bytes(void* memory) {
  Mbarrier& m = mbarriers[find_mbarrier(memory, "a copy's completion")];
  m.expected -= m.started;
  m.started = 0;
  end_phase_if_complete(&m);
}

void mbarrier_release(void* memory) {
  const int i = find_mbarrier(memory, "a store's completion");
  tsan_release(&mbarriers[i].sync->mbarriers[i][mbarriers[i].phase & 1]);
}

void fence_mbarrier_init() {
  for (int i = 0; i < num_mbarriers; ++i) mbarriers[i].fenced = true;
}

const unsigned char* async_view(const void* smem) {
  return block->async_view + (static_cast<const unsigned char*>(smem) - dynamic_smem());
}

bool same_in_async_view(const void* chunk) {
  return std::memcmp(chunk, async_view(chunk), 16) == 0;
}

// Not by memcpy, which ThreadSanitizer sees.
void write_async_view(void* smem, const void* from, std::size_t bytes) {
  unsigned char* to = const_cast<unsigned char*>(async_view(smem));
  typedef std::uint64_t Words __attribute__((vector_size(16), aligned(8), may_alias));
  const auto* words = static_cast<const volatile Words*>(from);
  std::size_t i = 0;
  for (; i + sizeof(Words) <= bytes; i += sizeof(Words))
    *reinterpret_cast<Words*>(to + i) = words[i / sizeof(Words)];
  for (; i < bytes; ++i) to[i] = static_cast<const volatile unsigned char*>(from)[i];
}

void fence_async_proxy() {
  fence_mbarrier_init();
  write_async_view(dynamic_smem(), dynamic_smem(), shape.smem_bytes);
}

void add_bulk_load(void* mbarrier, const BulkCopy& load) {
  const int i = find_mbarrier(mbarrier, "a copy's completion");
  BulkLoads& loads = bulk_loads[i];
  if (loads.count == BulkLoads::kMax) die("more than %d bulk loads in flight", BulkLoads::kMax);
  loads.loads[loads.count++] = load;
  tsan_release(&mbarriers[i].sync->tma_units[i]);
}

void run_tma(void* mbarrier, void (*complete)(const BulkLoads& loads)) {
  const int i = find_mbarrier(mbarrier, "a copy's completion");
  if (bulk_loads[i].count == 0) return;
  if (!tma_units[i].stack) make_fiber(&tma_units[i], tma_entry);
  copy_job = {i, complete};
  switch_fiber(&current->fiber, &tma_units[i]);
  bulk_loads[i].count = 0;
}

void mbarrier_promise(void* memory) {
  const int i = find_mbarrier(memory, "an arrival after copies");
  Mbarrier& m = mbarriers[i];
  if (m.arrived + m.promised == m.count) die("more arrivals than the mbarrier's phase takes");
  tsan_release(&mbarriers[i].sync->mbarriers[i][m.phase & 1]);
  ++m.promised;
}

int mbarrier_number(void* memory) {
  return find_mbarrier(memory, "a use");
}

bool mbarrier_wait(void* memory, int parity) {
  const int i = find_mbarrier(memory, "a wait");
  const Mbarrier& m = mbarriers[i];
  Worker* me = current;
  me->mbarrier = i;
  me->parity = parity;
  wait(State::kAtMbarrier, "an mbarrier");
  tsan_acquire(&mbarriers[i].sync->mbarriers[i][parity]);
  if (phase_complete(m, parity)) return false;
  mbarriers[i].promised = 0;  // the caller keeps them, before any other thread runs
  return true;
}

void mbarrier_acquire(void* memory, int parity) {
  const int i = find_mbarrier(memory, "a wait");
  tsan_acquire(&mbarriers[i].sync->mbarriers[i][parity]);
}

}  // namespace simt
