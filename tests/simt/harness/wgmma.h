#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "block.h"
#include "memory.h"

// wgmma: a product is computed at the last moment, the wait for its group. From its issue until
// then its accumulators hold a NaN of their own, and its operands, in registers and in shared
// memory, must stay what they were. Each lane reads its share of the operands at both ends, which
// is where ThreadSanitizer sees them.
namespace simt {

struct WgmmaInFlight {
  WgmmaOperation operation;
  const std::uint32_t* registers_a;  // where they came from; null: a is in shared memory
  int group;
  std::uint64_t checksum;  // of the lane's share of the operands
};

// Accumulators that operations in flight add to.
struct WgmmaAccumulators {
  float* registers;
  int count;
  std::unique_ptr<float[]> values;
};

struct WgmmaState {
  std::vector<WgmmaInFlight> operations;  // oldest first
  std::vector<WgmmaAccumulators> accumulators;
  int groups = 0;  // committed so far
  bool fenced = false;
  int issued = 0;
};

inline WgmmaState wgmma_states[kMaxThreads];
inline WgmmaState& wgmma_state() {
  return wgmma_states[this_thread().index];
}

constexpr std::uint32_t kInFlight = 0x7FC0DEADu;  // a NaN

// Reads the lane's share of the operands, and calls visit(chunk) for each. Which rows of a the
// hardware reads for which warp is not specified, so every warp reads all of them.
template <typename Visit>
void for_each_shared_chunk(const WgmmaOperation& o, Visit visit) {
  const int lane = this_thread().lane;
  constexpr int kChunksA = 2 * 64;
  for (int chunk = lane; chunk < kChunksA && !o.a_in_registers; chunk += kWarpSize)
    visit(wgmma_chunk(o.descriptor_a, o.a_mn_major, chunk));
  for (int chunk = lane; chunk < 2 * o.n; chunk += kWarpSize)
    visit(wgmma_chunk(o.descriptor_b, o.b_mn_major, chunk));
}

inline std::uint64_t checksum_of_operands(const WgmmaOperation& operation, bool are_issued) {
  std::uint64_t sum = 0;
  for_each_shared_chunk(operation, [&](const unsigned char* chunk) {
    if (are_issued && !same_in_async_view(chunk))
      die("wgmma reads what threads wrote without fence.proxy.async");
    sum = sum * 31 + checksum(chunk);
  });
  return sum;
}

inline void fence_wgmma() {
  wgmma_state().fenced = true;
}

inline void fill_in_flight(float* registers, int count) {
  for (int i = 0; i < count; ++i) std::memcpy(registers + i, &kInFlight, sizeof kInFlight);
}

// The accumulators' values while they are in flight.
inline float* take_accumulators(float* registers, int count) {
  for (WgmmaAccumulators& a : wgmma_state().accumulators) {
    if (a.registers == registers && a.count == count) return a.values.get();
    if (a.registers < registers + count && registers < a.registers + a.count)
      die("a wgmma whose accumulators overlap with those of another in flight");
  }
  WgmmaAccumulators a{registers, count, std::make_unique<float[]>(count)};
  std::memcpy(a.values.get(), registers, count * sizeof(float));
  fill_in_flight(registers, count);
  wgmma_state().accumulators.push_back(std::move(a));
  return wgmma_state().accumulators.back().values.get();
}

// `operation` without accumulators and registers of a; `registers_a` may be null.
inline void issue_wgmma(WgmmaOperation operation, float* accumulators,
                        const std::uint32_t* registers_a) {
  WgmmaState& state = wgmma_state();
  if (num_block_threads() % (4 * kWarpSize) != 0) die("wgmma in a part of a warpgroup");
  if (operation.n < 8 || operation.n > 256 || operation.n % 8 != 0)
    die("a wgmma of n = %d", operation.n);
  if (!state.fenced) die("wgmma without wgmma.fence after registers may have changed");
  operation.a_in_registers = registers_a != nullptr;
  if (registers_a) std::memcpy(operation.registers_a, registers_a, sizeof operation.registers_a);
  operation.accumulators = take_accumulators(accumulators, operation.n / 2);
  const std::uint64_t sum = checksum_of_operands(operation, true);
  if (this_thread().lane == 0) log_wgmma(state.issued++, operation);
  state.operations.push_back({operation, registers_a, state.groups, sum});
}

inline void commit_wgmma() {
  ++wgmma_state().groups;
}

inline void return_accumulators() {
  WgmmaState& state = wgmma_state();
  for (std::size_t i = 0; i < state.accumulators.size();) {
    WgmmaAccumulators& a = state.accumulators[i];
    bool in_flight = false;
    for (const WgmmaInFlight& other : state.operations)
      in_flight |= other.operation.accumulators == a.values.get();
    if (in_flight) {
      ++i;
      continue;
    }
    for (int e = 0; e < a.count; ++e) {
      if (std::memcmp(a.registers + e, &kInFlight, sizeof kInFlight) != 0)
        die("accumulators of a wgmma in flight were written");
    }
    std::memcpy(a.registers, a.values.get(), a.count * sizeof(float));
    state.accumulators.erase(state.accumulators.begin() + i);
  }
}

inline void wait_wgmma(int pending_groups) {
  WgmmaState& state = wgmma_state();
  std::vector<WgmmaOperation> done;
  for (const WgmmaInFlight& o : state.operations) {
    if (o.group >= state.groups - pending_groups) break;
    if (o.registers_a &&
        std::memcmp(o.registers_a, o.operation.registers_a, sizeof o.operation.registers_a) != 0) {
      die("registers of a that a wgmma in flight reads were written");
    }
    if (checksum_of_operands(o.operation, false) != o.checksum)
      die("shared memory that a wgmma in flight reads was written");
    done.push_back(o.operation);
  }
  WgmmaOperations operand{done.data(), static_cast<int>(done.size())};
  ordering_collective("wgmma.wait_group", 0xFFFFFFFFu, combine_wgmma, &operand);
  state.operations.erase(state.operations.begin(), state.operations.begin() + operand.count);
  return_accumulators();
  state.fenced = false;
}

// At a thread's end.
inline void finish_wgmma() {
  WgmmaState& state = wgmma_state();
  if (!state.operations.empty())
    die("the thread ends with %zu wgmma operations in flight", state.operations.size());
  if (this_thread().lane == 0) end_wgmma_log(state.issued);
  state.groups = 0;
  state.fenced = false;
  state.issued = 0;
}

}  // namespace simt
