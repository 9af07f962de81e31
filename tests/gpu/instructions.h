#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tensor_map.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

// Shows the results of Hopper's instructions, by small kernels whose results are known exactly.
// Compiled twice with the same expectations: by nvcc for a GPU (instructions.cu), which says
// whether they are right, and as host C++ (tests/simt), which says whether the models are.
//
// A world has
//   allocate<T>(count)                 memory that host and kernels see
//   launch(kernel)                     runs kernel() in Kernel::kThreads threads of one block
//   encode(map, tensor)                the tensor map of a TestTensor
namespace dlattn::test {

constexpr int kTileAt = 1024;  // barriers before it, the tile from there on

// 16-bit elements, dimensions {column, row, head, batch}.
struct TestTensor {
  std::uint16_t* data;
  int sizes[5];
  int pitch;  // elements from head to head of a row
  int box[5];
  int swizzle;  // in bytes; 0: none

  bool broadcast = false;  // one batch entry for all
  // Five dimensions: kFar rows, batch entries that begin at every row, and kFar steps of 2^34 bytes
  // less a row. So row kFar - n of entry m and kFar of the last is row m - n, for addresses wrap.
  int rank = 4;
  static constexpr int kFar = 1 << 30;

  std::int64_t stride(int dim) const {  // in elements
    if (dim == 3 && broadcast) return 0;
    if (dim == 3 && rank == 5) return stride(1);
    if (dim == 4) return (std::int64_t{1} << 33) - stride(1);
    return dim == 0 ? 1 : dim == 2 ? pitch : dim == 1 ? pitch * sizes[2] : stride(1) * sizes[1];
  }
  std::int64_t count() const {
    return rank == 5 ? stride(1) * sizes[3] : stride(1) * sizes[1] * sizes[3];
  }
  int box_elements() const { return box[0] * box[1] * box[2] * box[3]; }
};

// Where byte `offset` of a tile lies that is swizzled in rows of `span` bytes: the 16-byte chunks
// of a row change places by the number of the 128-byte line they are in.
inline int swizzled(int offset, int span) {
  return span == 0 ? offset : offset ^ (offset / 128 % (span / 16)) * 16;
}

class Checks {
 public:
  // Runs only what `filter` is a part of.
  explicit Checks(const char* filter) : filter_(filter) {}
  bool wants(const std::string& what) const { return what.find(filter_) != std::string::npos; }

  // Compares `count` numbers; `name` is the test's.
  template <typename T>
  void expect_equal(const T* got, const T* expected, std::int64_t count, const std::string& name) {
    std::int64_t wrong = 0, first = 0;
    for (std::int64_t i = count - 1; i >= 0; --i) {
      if (!(got[i] == expected[i])) ++wrong, first = i;
    }
    ++(wrong == 0 ? passed_ : failed_);
    std::printf("%s %s\n", wrong == 0 ? "ok  " : "FAIL", name.c_str());
    if (wrong != 0) {
      std::printf("  %lld of %lld differ, the first is %lld: %g, not %g\n",
                  static_cast<long long>(wrong), static_cast<long long>(count),
                  static_cast<long long>(first), static_cast<double>(got[first]),
                  static_cast<double>(expected[first]));
    }
    std::fflush(stdout);
  }
  int finish() const {
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ != 0 || passed_ == 0;
  }

 private:
  std::string filter_;
  int passed_ = 0, failed_ = 0;
};

// ---- bulk copies ----

struct LoadTile {
  static constexpr int kThreads = 128;
  ptx::TensorMap map;
  ptx::BoxAt at;
  int last;  // coordinate of a fifth dimension; negative: of four
  int elements;
  std::uint16_t* out;

  int smem_bytes() const { return kTileAt + elements * 2; }
  __device__ void operator()() const {
    const ptx::SmemAddress barrier = ptx::smem_address(ptx::dynamic_smem());
    auto* tile = reinterpret_cast<std::uint16_t*>(ptx::dynamic_smem() + kTileAt);
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(barrier, 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::prefetch_tensor_map(map);
      ptx::mbarrier_arrive_expect_tx(barrier, elements * 2);
      if (last < 0) {
        ptx::tma_load(ptx::smem_address(tile), map, barrier, at);
      } else {
        ptx::tma_load(ptx::smem_address(tile), map, barrier, at, last);
      }
    }
    ptx::mbarrier_sleep(barrier, 0);
    for (int i = static_cast<int>(threadIdx.x); i < elements; i += kThreads) out[i] = tile[i];
  }
};

// The tile holds its own elements' numbers.
struct StoreTile {
  static constexpr int kThreads = 128;
  ptx::TensorMap map;
  ptx::BoxAt at;
  int last;
  int elements;

  int smem_bytes() const { return kTileAt + elements * 2; }
  __device__ void operator()() const {
    auto* tile = reinterpret_cast<std::uint16_t*>(ptx::dynamic_smem() + kTileAt);
    for (int i = static_cast<int>(threadIdx.x); i < elements; i += kThreads)
      tile[i] = static_cast<std::uint16_t>(i);
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      if (last < 0) {
        ptx::tma_store(map, ptx::smem_address(tile), at);
      } else {
        ptx::tma_store(map, ptx::smem_address(tile), at, last);
      }
      ptx::tma_store_commit();
      ptx::tma_store_wait_read();
    }
  }
};

template <typename World>
TestTensor make_tensor(World& world, int swizzle) {
  TestTensor t{nullptr, {84, 50, 3, 2}, 88, {swizzle ? swizzle / 2 : 24, 40, 2, 1}, swizzle};
  t.data = world.template allocate<std::uint16_t>(t.count());
  for (std::int64_t i = 0; i < t.count(); ++i) t.data[i] = static_cast<std::uint16_t>(i % 65521);
  return t;
}

// Calls visit(element of the tile, index of the tensor's element or -1 where there is none). Rows
// of the tensor go on to multiples of `unit` elements.
template <typename Visit>
void for_each_of_box(const TestTensor& t, const int (&at)[5], int unit, Visit visit) {
  for (int i = 0; i < t.box_elements(); ++i) {
    std::uint64_t byte = 0;  // wraps
    bool inside = true;
    for (int dim = 0, rest = i; dim < t.rank; rest /= t.box[dim++]) {
      const int x = at[dim] + rest % t.box[dim];
      const int size = dim == 0 ? (t.sizes[dim] + unit - 1) / unit * unit : t.sizes[dim];
      inside &= x >= 0 && x < size;
      byte += static_cast<std::uint64_t>(x) * static_cast<std::uint64_t>(t.stride(dim)) * 2;
    }
    visit(swizzled(2 * i, t.swizzle) / 2, inside ? static_cast<std::int64_t>(byte / 2) : -1);
  }
}

// Within the tensor, over its end in each dimension and in the midst of a chunk, before its start.
// Columns are multiples of 8, 16 bytes: another is an illegal instruction. So is, to a store, a
// negative coordinate: the boxes after kNumStores are for loads alone.
constexpr int kNumStores = 4;
constexpr int kBoxesAt[][5] = {{0, 0, 0, 0},  {8, 10, 1, 1}, {64, 30, 2, 1},
                               {0, 45, 0, 2}, {-8, 0, 0, 0}, {0, -5, -1, 0}};
// Boxes of rank 5 with rows up to a sequence's end amid the tensor: fewer than a box has, more,
// all, none.
constexpr int kFar = TestTensor::kFar;
constexpr int kPackedBoxesAt[][5] = {{0, kFar - 7, 0, 7, kFar},
                                     {8, kFar - 11, 1, 30, kFar},
                                     {64, kFar - 70, 2, 90, kFar},
                                     {0, kFar - 40, 0, 99, kFar},
                                     {0, kFar + 3, 0, 50, kFar}};

template <typename World>
void test_load(World& world, Checks* checks, const TestTensor& t, const int (&at)[5],
               const std::string& name) {
  if (!checks->wants(name)) return;
  const int last = t.rank == 5 ? at[4] : -1;
  const int elements = t.box_elements();
  ptx::TensorMap map;
  world.encode(&map, t);
  auto* out = world.template allocate<std::uint16_t>(elements);
  std::memset(out, 0xFF, elements * 2);
  std::vector<std::uint16_t> expected(elements);
  for_each_of_box(t, at, 1, [&](int i, std::int64_t index) {
    expected[i] = index < 0 ? std::uint16_t{0} : t.data[index];
  });
  world.launch(LoadTile{map, {at[0], at[1], at[2], at[3]}, last, elements, out});
  checks->expect_equal<std::uint16_t>(out, expected.data(), elements, name);
}

template <typename World>
void test_store(World& world, Checks* checks, TestTensor t, const int (&at)[5],
                const std::string& name) {
  if (!checks->wants(name)) return;
  t.data = world.template allocate<std::uint16_t>(t.count());
  std::memset(t.data, 0xFF, t.count() * 2);
  ptx::TensorMap map;
  world.encode(&map, t);
  std::vector<std::uint16_t> expected(t.count(), 0xFFFF);
  constexpr int kUnit = 8;  // 16 bytes are stored whole or not at all
  for_each_of_box(t, at, kUnit, [&](int i, std::int64_t index) {
    if (index >= 0) expected[index] = static_cast<std::uint16_t>(i);
  });
  const int last = t.rank == 5 ? at[4] : -1;
  world.launch(StoreTile{map, {at[0], at[1], at[2], at[3]}, last, t.box_elements()});
  checks->expect_equal<std::uint16_t>(t.data, expected.data(), t.count(), name);
}

template <typename World>
void test_bulk_copies(World& world, Checks* checks) {
  for (const int swizzle : {128, 64, 32, 0}) {
    const TestTensor t = make_tensor(world, swizzle);
    int number = 0;
    for (const auto& at : kBoxesAt) {
      std::string where = " swizzle " + std::to_string(swizzle) + " at";
      for (int dim = 0; dim < 4; ++dim) where += " " + std::to_string(at[dim]);
      test_load(world, checks, t, at, "load" + where);
      if (number++ < kNumStores) test_store(world, checks, t, at, "store" + where);
    }
  }
  TestTensor broadcast = make_tensor(world, 128);
  broadcast.broadcast = true;
  test_load(world, checks, broadcast, {8, 10, 1, 1}, "load of a broadcast tensor");
  constexpr int kPackRows = 100;
  TestTensor pack{nullptr, {84, kFar, 3, kPackRows, kFar + 1}, 88, {64, 40, 2, 1, 1}, 128};
  pack.rank = 5;
  pack.data = world.template allocate<std::uint16_t>(pack.count());
  for (std::int64_t i = 0; i < pack.count(); ++i)
    pack.data[i] = static_cast<std::uint16_t>(i % 65521);
  for (const auto& at : kPackedBoxesAt) {
    const std::string where = " of a pack " + std::to_string(at[0]) + " " + std::to_string(at[3]);
    test_load(world, checks, pack, at, "load" + where);
    test_store(world, checks, pack, at, "store" + where);
  }
}

// ---- a ring of stages: a producer and two consumer warpgroups ----

struct Ring {
  static constexpr int kThreads = 384, kStages = 2, kTiles = 5, kStage = 64 * 32 * 2;
  ptx::TensorMap map;  // boxes of 64 columns, 32 rows
  float* out;          // [2, 128]

  int smem_bytes() const { return kTileAt + kStages * kStage; }
  __device__ void operator()() const {
    const ptx::SmemAddress base = ptx::smem_address(ptx::dynamic_smem());
    const auto full = [&](int i) { return base + 8 * (i % kStages); };
    const auto empty = [&](int i) { return base + 8 * (kStages + i % kStages); };
    const int group = static_cast<int>(threadIdx.x) / 128;
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(full(i), 1);
        ptx::mbarrier_init(empty(i), 8);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (group == 0) {
      ptx::lower_registers<24>();
      for (int i = 0; i < kTiles && threadIdx.x == 0; ++i) {
        ptx::mbarrier_sleep(empty(i), (i / kStages + 1) % 2);
        ptx::mbarrier_arrive_expect_tx(full(i), kStage);
        // Two copies for one phase.
        const ptx::SmemAddress stage = base + kTileAt + i % kStages * kStage;
        ptx::tma_load(stage, map, full(i), {0, 32 * i, 0, 0});
        ptx::tma_load(stage + kStage / 2, map, full(i), {0, 32 * i + 16, 0, 0});
      }
      return;
    }
    ptx::raise_registers<240>();
    const int thread = static_cast<int>(threadIdx.x) % 128;
    float sum = 0.0f;
    for (int i = 0; i < kTiles; ++i) {
      ptx::mbarrier_sleep(full(i), i / kStages % 2);
      const auto* stage =
          reinterpret_cast<const half*>(ptx::dynamic_smem() + kTileAt + i % kStages * kStage);
      for (int e = 0; e < 16; ++e)
        sum += static_cast<float>(i + 1) * __half2float(stage[thread * 16 + e]);
      __syncwarp();
      if (thread % 32 == 0) ptx::mbarrier_arrive(empty(i));
    }
    out[(group - 1) * 128 + thread] = sum;
  }
};

template <typename World>
void test_ring(World& world, Checks* checks) {
  const char* const name = "ring of a producer and two consumers";
  if (!checks->wants(name)) return;
  constexpr int kRows = 32 * Ring::kTiles;
  TestTensor t{nullptr, {64, kRows, 1, 1}, 64, {64, 16, 1, 1}, 128, false};
  t.data = world.template allocate<std::uint16_t>(t.count());
  auto* elements = reinterpret_cast<half*>(t.data);
  for (int i = 0; i < 64 * kRows; ++i) elements[i] = __float2half(static_cast<float>(i * 7 % 31));
  Ring ring{};
  world.encode(&ring.map, t);
  ring.out = world.template allocate<float>(256);
  std::vector<float> expected(256);
  for (int i = 0; i < 256 * Ring::kTiles * 16; ++i) {
    const int thread = i / (Ring::kTiles * 16), tile = i / 16 % Ring::kTiles, e = i % 16;
    const int at = swizzled((thread % 128 * 16 + e) * 2, 128) / 2;
    expected[thread] += static_cast<float>(tile + 1) * __half2float(elements[tile * 32 * 64 + at]);
  }
  world.launch(ring);
  checks->expect_equal(ring.out, expected.data(), 256, name);
}

// ---- stmatrix and ldmatrix ----

struct Matrices {
  static constexpr int kThreads = 32;
  std::uint16_t* stored;  // [16, 16], the four matrices as quarters
  std::uint32_t* loaded;  // [32, 4]

  int smem_bytes() const { return 512; }
  __device__ void operator()() const {
    const int lane = static_cast<int>(threadIdx.x);
    std::uint32_t r[4];
    for (int i = 0; i < 4; ++i) {  // element (row, column) of matrix i is 64 i + 8 row + column
      const std::uint32_t first = 64 * i + lane / 4 * 8 + lane % 4 * 2;
      r[i] = (first + 1) << 16 | first;
    }
    const int row = lane % 8 + lane / 16 * 8, column = lane / 8 % 2 * 8;
    const ptx::SmemAddress at = ptx::smem_address(ptx::dynamic_smem()) + row * 32 + column * 2;
    ptx::stmatrix_x4(at, r);
    __syncwarp();
    const auto* tile = reinterpret_cast<const std::uint16_t*>(ptx::dynamic_smem());
    for (int i = lane; i < 256; i += 32) stored[i] = tile[i];
    ptx::ldmatrix_x4(r, at);
    for (int i = 0; i < 4; ++i) loaded[lane * 4 + i] = r[i];
  }
};

template <typename World>
void test_matrices(World& world, Checks* checks) {
  if (!checks->wants("stmatrix") && !checks->wants("ldmatrix")) return;
  Matrices matrices{world.template allocate<std::uint16_t>(256),
                    world.template allocate<std::uint32_t>(128)};
  std::vector<std::uint16_t> stored(256);
  std::vector<std::uint32_t> loaded(128);
  for (int i = 0; i < 256; ++i) {
    const int row = i / 16, column = i % 16, matrix = row / 8 * 2 + column / 8;
    stored[i] = static_cast<std::uint16_t>(64 * matrix + row % 8 * 8 + column % 8);
  }
  for (int i = 0; i < 128; ++i) {
    const std::uint32_t first = 64 * (i % 4) + i / 4 / 4 * 8 + i / 4 % 4 * 2;
    loaded[i] = (first + 1) << 16 | first;
  }
  world.launch(matrices);
  checks->expect_equal(matrices.stored, stored.data(), 256, "stmatrix");
  checks->expect_equal(matrices.loaded, loaded.data(), 128, "ldmatrix");
}

}  // namespace dlattn::test
