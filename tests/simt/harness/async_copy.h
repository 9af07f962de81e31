#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "block.h"
#include "memory.h"

// cp.async: what a copy writes is undefined from its issue to the issuing thread's wait. So the
// destination is overwritten with NaNs at issue, which is also the first moment at which the write
// may race with a reader, and gets its content at the wait, the last such moment.
namespace simt {

struct AsyncCopy {
  void* dst;
  const void* src;  // null: zeros
  unsigned bytes;
  int group;
};

struct AsyncState {
  std::vector<AsyncCopy> copies;  // in flight, oldest first
  int groups = 0;                 // committed so far
  bool has_promised = false;      // whether an mbarrier was to wait for copies
  // Whose completion an mbarrier waits for, by the mbarrier's number. Its phases order the accesses
  // of different threads to them.
  std::vector<AsyncCopy> promised[kMaxMbarriers];
};

inline AsyncState async_states[kMaxThreads];
inline AsyncState& async_state() {
  return async_states[this_thread().index];
}

inline void issue_async_copy(void* dst, const void* src, unsigned bytes, bool valid) {
  if (reinterpret_cast<std::uintptr_t>(dst) % bytes != 0) {
    die("cp.async of %u bytes to %p, which is not a multiple of that", bytes, dst);
  }
  if (reinterpret_cast<std::uintptr_t>(src) % bytes != 0) {
    die("cp.async of %u bytes from %p, which is not a multiple of that", bytes, src);
  }
  if (!in_dynamic_smem(dst, bytes)) die("cp.async to %p, which is not in shared memory", dst);
  check_global_access();
  if (valid) touch(src, bytes);
  overwrite(dst, nullptr, bytes, 0xFFFFFFFFu);
  AsyncState& state = async_state();
  state.copies.push_back({dst, valid ? src : nullptr, bytes, state.groups});
}

inline void commit_async_copies() {
  ++async_state().groups;
}

inline void complete(const AsyncCopy& copy) {
  overwrite(copy.dst, copy.src, copy.bytes, 0);
}

// Their arrival at an mbarrier is the only moment known at which copies are complete.
inline void promise_async_copies(void* mbarrier) {
  touch(mbarrier, 8);
  AsyncState& state = async_state();
  if (state.copies.empty()) return mbarrier_arrive(mbarrier);
  state.has_promised = true;
  state.promised[mbarrier_number(mbarrier)].swap(state.copies);
  mbarrier_promise(mbarrier);
}

// Those that an mbarrier waits for alone.
inline void complete_promised_copies(void* mbarrier) {
  const int number = mbarrier_number(mbarrier);
  for (AsyncState& state : async_states) {
    if (state.promised[number].empty()) continue;
    for (const AsyncCopy& copy : state.promised[number]) complete(copy);
    state.promised[number].clear();
    mbarrier_arrive(mbarrier);
  }
}

inline void wait_async_copies(int pending_groups) {
  AsyncState& state = async_state();
  std::size_t done = 0;
  for (; done < state.copies.size(); ++done) {
    const AsyncCopy& copy = state.copies[done];
    if (copy.group >= state.groups - pending_groups) break;
    complete(copy);
  }
  state.copies.erase(state.copies.begin(), state.copies.begin() + done);
}

// At a thread's end. A copy still in flight would write into memory that the block no longer owns.
inline void finish_async_copies() {
  AsyncState& state = async_state();
  if (!state.copies.empty()) {
    die("the thread ends with %zu cp.async copies that it never waited for", state.copies.size());
  }
  for (int i = 0; i < kMaxMbarriers && state.has_promised; ++i) {
    const std::vector<AsyncCopy>& promised = state.promised[i];
    if (!promised.empty()) {
      die("the thread ends with %zu cp.async copies whose mbarrier nobody waited for",
          promised.size());
    }
  }
  state.groups = 0;
  state.has_promised = false;
}

}  // namespace simt
