#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "block.h"
#include "memory.h"

// Bulk copies of tensor tiles (TMA). The destination of a load holds NaNs from its issue until
// somebody waits for it at its mbarrier, and the content then. A store reads its source until the
// issuing thread's wait, and is done there: the source must still be what it was at the issue. A
// write or an addition of fp32 numbers to global memory reads its source by the wait for that, and
// is done at the wait for writes or at the thread's end.
namespace simt {

// The encoding's demands, then those of this model.
inline void check_tensor_map(const TensorMap& map) {
  if (map.rank < 1 || map.rank > kMaxRank) die("a tensor map of rank %d", map.rank);
  if (reinterpret_cast<std::uintptr_t>(map.address) % 16 != 0)
    die("a tensor map of the address %p, which is not a multiple of 16", map.address);
  for (int i = 0; i < map.rank; ++i) {
    if (map.sizes[i] < 1) die("a tensor map whose dimension %d is empty", i);
    if (map.box[i] < 1 || map.box[i] > 256) die("a tensor map with a box of %d", map.box[i]);
    if (i > 0 && (map.strides[i] % 16 != 0 || map.strides[i] < 0 || map.strides[i] >> 40 != 0))
      die("a tensor map with a stride of %lld bytes", static_cast<long long>(map.strides[i]));
  }
  const int row = map.box[0] * map.element_bytes;
  if (row % 16 != 0) die("a tensor map with box rows of %d bytes", row);
  if (map.swizzle != 0 && row > map.swizzle)
    die("a tensor map with box rows of %d bytes, which swizzles %d", row, map.swizzle);
  if (map.swizzle != 0 && row != map.swizzle)
    die("a tensor map with box rows shorter than the %d bytes it swizzles: not modelled",
        map.swizzle);
}

inline std::uint32_t box_bytes(const TensorMap& map) {
  std::uint32_t bytes = map.element_bytes;
  for (int i = 0; i < map.rank; ++i) bytes *= map.box[i];
  return bytes;
}

// 16 bytes of a box: where they lie in shared memory, and the part [begin, end) of them that the
// tensor has, from `global` on.
struct BoxChunk {
  unsigned char* smem;
  unsigned char* global;
  int begin, end;
};

template <typename Visit>
void for_each_chunk(const TensorMap& map, unsigned char* smem, const int* coordinates,
                    Visit visit) {
  constexpr int kChunk = 16;
  const int row_bytes = map.box[0] * map.element_bytes;
  const int rows = static_cast<int>(box_bytes(map)) / row_bytes;
  for (int row = 0; row < rows; ++row) {
    bool inside = true;
    std::uint64_t offset = 0;  // addresses wrap
    for (int i = 1, rest = row; i < map.rank; rest /= map.box[i++]) {
      const std::int64_t at = coordinates[i] + std::int64_t{rest % map.box[i]};
      inside &= at >= 0 && at < std::int64_t{map.sizes[i]};
      offset += static_cast<std::uint64_t>(at) * static_cast<std::uint64_t>(map.strides[i]);
    }
    const std::int64_t size = std::int64_t{map.sizes[0]} * map.element_bytes;
    for (int x = 0; x < row_bytes; x += kChunk) {
      const std::int64_t first = std::int64_t{coordinates[0]} * map.element_bytes + x;
      BoxChunk chunk{nullptr, nullptr, 0, 0};
      if (inside && first < size && first + kChunk > 0) {
        chunk.begin = static_cast<int>(first < 0 ? -first : 0);
        chunk.end = static_cast<int>(first + kChunk > size ? size - first : kChunk);
        chunk.global = reinterpret_cast<unsigned char*>(
            reinterpret_cast<std::uintptr_t>(map.address) + offset + first + chunk.begin);
      }
      std::uintptr_t at = static_cast<std::uintptr_t>(smem - dynamic_smem()) + row * row_bytes + x;
      if (map.swizzle != 0) at ^= (at >> 7 & (map.swizzle / kChunk - 1)) << 4;
      chunk.smem = dynamic_smem() + at;
      visit(chunk);
    }
  }
}

// A copy of fp32 numbers to global memory, without a tensor map, or their addition.
struct BulkWrite {
  enum Kind { kStore, kAddition } kind;
  float* to;
  unsigned char* smem;
  int bytes, group;
  std::uint64_t checksum;
  std::vector<float> numbers;  // once they are read
};

struct BulkState {
  std::vector<BulkCopy> stores;  // in flight, oldest first
  std::vector<BulkWrite> writes;
  int groups = 0;  // committed so far
};

inline BulkState bulk_states[kMaxThreads];
inline BulkState& bulk_state() {
  return bulk_states[this_thread().index];
}

inline BulkCopy make_bulk_copy(const TensorMap& map, unsigned char* smem, const int* coordinates,
                               int rank) {
  check_tensor_map(map);
  if (rank != map.rank) die("%d coordinates for a tensor map of rank %d", rank, map.rank);
  const std::size_t unit = map.swizzle ? 8 * map.swizzle : 128;
  if ((smem - dynamic_smem()) % unit != 0)
    die("a bulk copy at shared memory's byte %td, not a multiple of %zu", smem - dynamic_smem(),
        unit);
  if (!in_dynamic_smem(smem, box_bytes(map))) die("a bulk copy beyond shared memory");
  // As a GPU, which takes it for an illegal instruction.
  if (coordinates[0] * map.element_bytes % 16 != 0)
    die("a bulk copy at column %d, in the midst of 16 bytes", coordinates[0]);
  check_global_access();
  BulkCopy copy{map, smem, {}, 0, 0, nullptr, 0};
  std::memcpy(copy.coordinates, coordinates, rank * sizeof(int));
  return copy;
}

inline void issue_bulk_load(const TensorMap& map, unsigned char* smem, void* mbarrier,
                            const int* coordinates, int rank) {
  const BulkCopy copy = make_bulk_copy(map, smem, coordinates, rank);
  touch(mbarrier, 8);
  mbarrier_start_bytes(mbarrier, box_bytes(map));
  for_each_chunk(map, smem, coordinates, [](const BoxChunk& chunk) {
    if (chunk.global) touch(chunk.global, chunk.end - chunk.begin);
    overwrite(chunk.smem, nullptr, 16, 0xFFFFFFFFu);
    write_async_view(chunk.smem, chunk.smem, 16);
  });
  add_bulk_load(mbarrier, copy);
}

inline std::uint64_t checksum_of(const unsigned char* from, int bytes) {
  std::uint64_t sum = 0;
  for (int b = 0; b < bytes; b += 16) sum = sum * 31 + checksum(from + b);
  return sum;
}

// Between blocks of a cluster; `dst` and the mbarrier are those of block `rank`. As a bulk load,
// but that the source must still be what it was when somebody waits.
inline void issue_block_copy(unsigned char* dst, const unsigned char* from, int bytes,
                             void* mbarrier, unsigned rank) {
  const auto offset = from - dynamic_smem();
  if (offset % 16 != 0 || bytes % 16 != 0)
    die("a bulk copy of %d bytes from shared memory's byte %td", bytes, offset);
  if (!in_dynamic_smem(from, bytes)) die("a bulk copy from beyond shared memory");
  for (int b = 0; b < bytes; b += 16) {
    if (!same_in_async_view(from + b))
      die("a bulk copy of what threads wrote without fence.proxy.async");
  }
  auto issue = [&] {
    if (!in_dynamic_smem(dst, bytes)) die("a bulk copy beyond shared memory");
    touch(mbarrier, 8);
    mbarrier_start_bytes(mbarrier, static_cast<std::uint32_t>(bytes));
    for (int b = 0; b < bytes; b += 16) {
      overwrite(dst + b, nullptr, 16, 0xFFFFFFFFu);
      write_async_view(dst + b, dst + b, 16);
    }
    add_bulk_load(mbarrier, {{}, dst, {}, 0, checksum_of(from, bytes), from, bytes});
  };
  as_block(rank, [](void* f) { (*static_cast<decltype(issue)*>(f))(); }, &issue);
}

inline void complete_block_copy(const BulkCopy& copy) {
  if (checksum_of(copy.from, copy.bytes) != copy.checksum)
    die("the source of a bulk copy changed before the copy was waited for");
  for (int b = 0; b < copy.bytes; b += 16) {
    overwrite(copy.smem + b, copy.from + b, 16, 0);
    write_async_view(copy.smem + b, copy.smem + b, 16);
  }
}

inline void complete_bulk_loads(void* mbarrier) {
  run_tma(mbarrier, [](const BulkLoads& all) {
    for (int i = 0; i < all.count; ++i) {
      const BulkCopy& load = all.loads[i];
      if (load.from) {
        complete_block_copy(load);
        continue;
      }
      for_each_chunk(load.map, load.smem, load.coordinates, [](const BoxChunk& chunk) {
        unsigned char content[16] = {};  // zeros where the tensor ends
        for (int b = chunk.begin; b < chunk.end; ++b) content[b] = chunk.global[b - chunk.begin];
        overwrite(chunk.smem, content, 16, 0);
        write_async_view(chunk.smem, content, 16);
      });
    }
  });
  mbarrier_complete_bytes(mbarrier);
}

inline std::uint64_t checksum_of_source(const BulkCopy& copy) {
  std::uint64_t sum = 0;
  for_each_chunk(copy.map, copy.smem, copy.coordinates, [&](const BoxChunk& chunk) {
    if (chunk.global) sum = sum * 31 + checksum(chunk.smem);
  });
  return sum;
}

inline void issue_bulk_store(const TensorMap& map, unsigned char* smem, const int* coordinates,
                             int rank) {
  BulkCopy copy = make_bulk_copy(map, smem, coordinates, rank);
  for (int i = 0; i < rank; ++i) {
    if (coordinates[i] < 0) die("a bulk store at a coordinate of %d", coordinates[i]);
  }
  for_each_chunk(map, smem, coordinates, [](const BoxChunk& chunk) {
    if (chunk.global && !same_in_async_view(chunk.smem))
      die("a bulk store of what threads wrote without fence.proxy.async");
  });
  copy.group = bulk_state().groups;
  copy.checksum = checksum_of_source(copy);
  bulk_state().stores.push_back(copy);
}

inline void issue_bulk_write(float* to, unsigned char* smem, int bytes, BulkWrite::Kind kind) {
  const char* const what = kind == BulkWrite::kStore ? "bulk store" : "bulk addition";
  const auto offset = smem - dynamic_smem();
  if (offset % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(to) % 16 != 0)
    die("a %s of %d bytes from shared memory's byte %td to %p", what, bytes, offset,
        static_cast<void*>(to));
  if (!in_dynamic_smem(smem, bytes)) die("a %s from beyond shared memory", what);
  check_global_access();
  if (kind == BulkWrite::kStore) {
    touch(to, bytes);
  } else {  // others may add at the same time
    for (int b = 0; b < bytes; b += 4)
      __atomic_load_n(reinterpret_cast<std::uint32_t*>(to) + b / 4, __ATOMIC_RELAXED);
  }
  for (int b = 0; b < bytes; b += 16) {
    if (!same_in_async_view(smem + b))
      die("a %s of what threads wrote without fence.proxy.async", what);
  }
  bulk_state().writes.push_back(
      {kind, to, smem, bytes, bulk_state().groups, checksum_of(smem, bytes), {}});
}

// Atomic, as ThreadSanitizer sees it: additions of several threads are no race, others' plain
// accesses beside them are.
inline void add_atomically(float* to, float number) {
  auto* bits = reinterpret_cast<std::uint32_t*>(to);
  std::uint32_t before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
  do {
    float sum;
    std::memcpy(&sum, &before, sizeof sum);
    sum += number;
    std::memcpy(&after, &sum, sizeof after);
  } while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
}

inline void commit_bulk_stores() {
  ++bulk_state().groups;
}

// 16 bytes that begin within the tensor are stored whole, beyond its last column too: a GPU does
// that. Both forms of the wait: that for the source to be read and that for the tensor to be
// written.
inline void wait_bulk_stores(int pending_groups) {
  BulkState& state = bulk_state();
  std::size_t done = 0;
  for (; done < state.stores.size(); ++done) {
    const BulkCopy& store = state.stores[done];
    if (store.group >= state.groups - pending_groups) break;
    if (checksum_of_source(store) != store.checksum)
      die("the source of a bulk store changed before the store was waited for");
    for_each_chunk(store.map, store.smem, store.coordinates, [](const BoxChunk& chunk) {
      if (chunk.global) overwrite(chunk.global, chunk.smem, 16, 0);
    });
  }
  state.stores.erase(state.stores.begin(), state.stores.begin() + done);
  for (BulkWrite& write : state.writes) {
    if (write.group >= state.groups - pending_groups) break;
    if (!write.numbers.empty()) continue;
    if (checksum_of(write.smem, write.bytes) != write.checksum)
      die("the source of a bulk %s changed before it was waited for",
          write.kind == BulkWrite::kStore ? "store" : "addition");
    write.numbers.resize(write.bytes / sizeof(float));
    std::memcpy(write.numbers.data(), write.smem, write.bytes);
  }
}

// Makes those whose source has been read.
inline void wait_bulk_writes(int pending_groups) {
  BulkState& state = bulk_state();
  std::size_t done = 0;
  for (; done < state.writes.size(); ++done) {
    const BulkWrite& write = state.writes[done];
    if (write.group >= state.groups - pending_groups) break;
    for (std::size_t i = 0; i < write.numbers.size(); ++i) {
      if (write.kind == BulkWrite::kStore) {
        write.to[i] = write.numbers[i];
      } else {
        add_atomically(write.to + i, write.numbers[i]);
      }
    }
  }
  state.writes.erase(state.writes.begin(), state.writes.begin() + done);
}

// At a thread's end: a store would read shared memory that the block no longer owns.
inline void finish_bulk_stores() {
  for (const BulkWrite& write : bulk_state().writes) {
    if (write.numbers.empty()) die("the thread ends with bulk additions that it never waited for");
  }
  wait_bulk_writes(0);
  if (!bulk_state().stores.empty())
    die("the thread ends with %zu bulk stores that it never waited for",
        bulk_state().stores.size());
  bulk_state().groups = 0;
}

}  // namespace simt
