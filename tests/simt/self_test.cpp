// Does the harness see what it is there to see?
#include "self_test.h"

#include <mma.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma8.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/ptx/wmma.cuh"
#include "cuda/tile/vec.cuh"
#include "harness/launch.h"

namespace ptx = dlattn::ptx;
namespace wmma = nvcuda::wmma;
using namespace simt::self_test;

namespace {

constexpr int kThreads = 64;

simt::Launch one_block(std::size_t smem_bytes, simt::Schedule schedule = 0) {
  return {dim3(1), dim3(kThreads), smem_bytes, schedule};
}

template <typename T = float>
T* smem() {
  return reinterpret_cast<T*>(ptx::dynamic_smem());
}

// d + 32 times x y in all of d, by bytes of e4m3.
float e4m3_sum(float d, std::uint32_t x, std::uint32_t y) {
  float result = 0.0f;
  simt::launch({dim3(1), dim3(32), 0}, [&] {
    float sum[4] = {d, d, d, d};
    const std::uint32_t a = x * 0x01010101u, b = y * 0x01010101u;
    ptx::mma_e4m3(sum, {a, a, a, a}, b, b);
    if (threadIdx.x == 0) result = sum[0];
  });
  return result;
}

// Compute capability 8.9's accumulator has 14 bits, and cuts off what does not fit.
void e4m3_accumulator() {
  constexpr std::uint32_t kOne = 0x38, kMinusOne = 0xB8, kLeast = 0x01, kLargest = 0x7E;
  const struct {
    float d;
    std::uint32_t x, y;
    float expected;
  } sums[] = {
      {0.0f, kOne, kOne, 32.0f},
      {8191.0f, kOne, kOne, 8191.0f + 32.0f},
      {16384.0f, kOne, kOne, 16384.0f},  // each 1 is cut off
      {16384.0f, kMinusOne, kOne, 16384.0f},
      {-16384.0f, kMinusOne, kOne, -16384.0f},
      {16000.0f, kMinusOne, kOne, 16000.0f - 32.0f},
      {1.0f + 0x1p-14f, kOne, 0, 1.0f},  // the accumulator itself
      {0.0f, kLeast, kLeast, 32 * 0x1p-18f},
      {0.0f, kLargest, kLargest, 32 * 448.0f * 448.0f},
      {0.5f, kLargest, kLargest, 32 * 448.0f * 448.0f},
      {0.0f, 0x7F, kOne, NAN},
      {INFINITY, kOne, kOne, INFINITY},
  };
  for (const auto& sum : sums) {
    const float got = e4m3_sum(sum.d, sum.x, sum.y);
    if (got != sum.expected && !(std::isnan(got) && std::isnan(sum.expected)))
      fail("a sum of products of e4m3");
  }
}

// Accumulators of fp16 are rounded to nearest even after 16 products, and overflow from 65520 on.
void e4m3_half_accumulator() {
  constexpr std::uint32_t kOne = 0x38, kLeast = 0x01, k8 = 0x50, k16 = 0x58, k60 = 0x67;
  const struct {
    float d;
    std::uint32_t x, y;
    float expected;
  } sums[] = {
      {0.0f, kOne, kOne, 32.0f},
      {2048.0f, kOne, kOne, 2080.0f},
      {32800.0f, kOne, kOne, 32800.0f},  // each 1 is cut off
      {1.0f, k16, k8, 4096.0f},          // 2049 is a tie
      {3.0f, k16, k8, 4100.0f},          // 2051 too
      {0.0f, kLeast, kLeast, 32 * 0x1p-18f},
      {0.0f, k16, k60, 30720.0f},
      {30720.0f, k16, k60, 61440.0f},
      {61440.0f, k16, k60, INFINITY},
      {0.0f, 0x7F, kOne, NAN},
  };
  for (const auto& sum : sums) {
    float got = 0.0f;
    simt::launch({dim3(1), dim3(32), 0}, [&] {
      const std::uint32_t d = __half_raw(__float2half_rn(sum.d)).x, pair = d << 16 | d;
      const std::uint32_t a = sum.x * 0x01010101u, b = sum.y * 0x01010101u;
      std::uint32_t result[2] = {pair, pair};
      ptx::mma_e4m3(result, {a, a, a, a}, b, b);
      __half_raw raw;
      raw.x = static_cast<unsigned short>(result[1] >> 16);
      if (threadIdx.x == 0) got = __half2float(raw);
    });
    if (got != sum.expected && !(std::isnan(got) && std::isnan(sum.expected))) {
      std::printf("%g + 32 * %#x * %#x = %g\n", sum.d, sum.x, sum.y, got);
      fail("a sum of products of e4m3 in fp16");
    }
  }
}

// Conversions to half return a struct, whose store GCC instruments only once the call is inlined.
template <typename T>
void converted_store() {
  std::vector<float> out(kThreads, NAN);
  simt::launch(one_block(kThreads * sizeof(T)), [&] {
    const int i = threadIdx.x;
    smem<T>()[i] = dlattn::tile::from_float<T>(1.0f);
    out[i] = dlattn::tile::to_float(smem<T>()[i ^ 32]);
  });
  if (out[0] != 1.0f) fail("converted numbers");
}

// out[i] = in[kThreads - 1 - i], through shared memory.
void reverse(bool barrier) {
  std::vector<float> in(kThreads), out(kThreads, NAN);
  for (int i = 0; i < kThreads; ++i) in[i] = static_cast<float>(i);
  for (simt::Schedule schedule = 0; schedule < 6; ++schedule) {
    simt::launch(one_block(kThreads * sizeof(float), schedule), [&] {
      const int i = threadIdx.x;
      smem()[i] = in[i];
      if (barrier) __syncthreads();
      out[i] = smem()[kThreads - 1 - i];
    });
    for (int i = 0; i < kThreads; ++i) {
      if (!(out[i] == in[kThreads - 1 - i])) fail("reversed numbers");
    }
  }
}

// Two rounds through one buffer: without the second barrier a fast thread overwrites what a slow
// one still reads.
void two_rounds(bool second_barrier) {
  std::vector<float> out(kThreads, 0.0f);
  simt::launch(one_block(kThreads * sizeof(float)), [&] {
    const int i = threadIdx.x;
    for (int round = 0; round < 3; ++round) {
      smem()[i] = static_cast<float>(i + round);
      __syncthreads();
      out[i] += smem()[i ^ 32];
      if (second_barrier) __syncthreads();
    }
  });
  for (int i = 0; i < kThreads; ++i) {
    if (out[i] != 3.0f * (i ^ 32) + 3.0f) fail("sum of rounds");
  }
}

enum class Wait { kRight, kNone, kTooFew };

// Neighbours' halves of a global array, by cp.async in two groups.
void async_copies(Wait wait, bool barrier, int misalign = 0) {
  std::vector<float> in(8 * kThreads + 4, 1.0f), out(kThreads, NAN);
  simt::launch(one_block(8 * kThreads * sizeof(float)), [&] {
    const int i = threadIdx.x, j = i ^ 1;
    ptx::cp_async<16>(smem() + 4 * i, &in[4 * i + misalign], true);
    ptx::cp_async_commit();
    ptx::cp_async<16>(smem() + 4 * (kThreads + i), &in[4 * (kThreads + i)], i % 2 == 0);
    ptx::cp_async_commit();
    if (wait == Wait::kRight) ptx::cp_async_wait<0>();
    if (wait == Wait::kTooFew) ptx::cp_async_wait<1>();
    if (barrier) __syncthreads();
    out[i] = smem()[4 * j] + smem()[4 * (kThreads + j)];
    if (wait == Wait::kTooFew) ptx::cp_async_wait<0>();
  });
  for (int i = 0; i < kThreads; ++i) {
    if (!(out[i] == (i % 2 == 0 ? 1.0f : 2.0f))) fail("copied numbers");
  }
}

// A copy into a buffer that other threads still read, though everybody waits for it properly
// afterwards.
void early_copy(bool barrier) {
  std::vector<float> in(4 * kThreads, 2.0f), out(kThreads, NAN);
  simt::launch(one_block(4 * kThreads * sizeof(float)), [&] {
    const int i = threadIdx.x;
    for (int e = 0; e < 4; ++e) smem()[4 * i + e] = 1.0f;
    __syncthreads();
    out[i] = smem()[4 * (i ^ 32)];
    if (barrier) __syncthreads();
    ptx::cp_async<16>(smem() + 4 * i, &in[4 * i], true);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    out[i] += smem()[4 * (i ^ 32)];
  });
  for (int i = 0; i < kThreads; ++i) {
    if (out[i] != 3.0f) fail("numbers before and after");
  }
}

void copy_outside_smem() {
  std::vector<float> in(4 * kThreads, 2.0f), out(4 * kThreads);
  simt::launch(one_block(4 * kThreads * sizeof(float)), [&] {
    ptx::cp_async<16>(&out[4 * threadIdx.x], &in[4 * threadIdx.x], true);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  });
}

void load_matrix_past_smem() {
  simt::launch({dim3(1), dim3(32), 16 * 24 * sizeof(half), 0}, [] {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> f;
    ptx::load_matrix(f, smem<half>() + 16, 24);
  });
}

void unwaited_copy() {
  std::vector<float> in(4 * kThreads, 2.0f);
  simt::launch(one_block(4 * kThreads * sizeof(float)), [&] {
    ptx::cp_async<16>(smem() + 4 * threadIdx.x, &in[4 * threadIdx.x], true);
    ptx::cp_async_commit();
  });
}

// The last thread writes `excess` floats past the dynamic shared memory's end; it ends amid a
// granule of ASan's.
void smem_bounds(int excess) {
  simt::launch(one_block(kThreads * sizeof(float) - 4), [&] {
    if (threadIdx.x + 1 < kThreads) smem()[threadIdx.x + excess] = 1.0f;
  });
}

void uninitialised_smem() {
  float out = 0.0f;
  simt::launch(one_block(kThreads * sizeof(float)), [&] {
    if (threadIdx.x == 0) out = smem()[7];
  });
  if (std::isnan(out)) fail("shared memory that nobody wrote");
}

// An element of an array that the compiler takes for written.
__attribute__((noinline)) float element_of_local(bool write) {
  float x[64];
  asm volatile("" : "=m"(x));
  for (int i = 0; write && i < 64; ++i) x[i] = 1.0f;
  asm volatile("" : : "m"(x));
  return x[7];
}

// The array of the second block lies where that of the first one did.
void uninitialised_local() {
  float out = 0.0f;
  simt::launch({dim3(2), dim3(kThreads), 0, 0}, [&] {
    const float x = element_of_local(blockIdx.x == 0);
    if (blockIdx.x == 1 && threadIdx.x == 0) out = x;
  });
  if (std::isnan(out)) fail("a local variable that nobody wrote");
}

void divergent_barrier() {
  simt::launch(one_block(0), [&] {
    if (threadIdx.x < 32) __syncthreads();
    if (threadIdx.x >= 32) __syncthreads();
  });
}

void exit_before_barrier() {
  simt::launch(one_block(0), [&] {
    if (threadIdx.x == 5) return;
    __syncthreads();
  });
}

enum class Groups { kRight, kNoBarrier, kOneBarrier, kUneven };

// Four groups of two warps reverse their numbers, each within itself and as often as its number
// says, with barriers of their own.
void reverse_in_groups(Groups groups) {
  constexpr int kGroup = 64;
  std::vector<float> out(4 * kGroup, NAN);
  for (simt::Schedule schedule = 0; schedule < 6; ++schedule) {
    simt::launch({dim3(1), dim3(4 * kGroup), 4 * kGroup * sizeof(float), schedule}, [&] {
      const int i = threadIdx.x, group = i / kGroup, first = group * kGroup;
      const int id = groups == Groups::kOneBarrier ? 1 : 1 + group;
      for (int round = 0; round <= group; ++round) {
        smem()[i] = static_cast<float>(i + round);
        if (groups != Groups::kNoBarrier) ptx::barrier_sync(id, kGroup);
        out[i] = smem()[first + kGroup - 1 - i % kGroup];
        if (groups != Groups::kUneven || round < 2) ptx::barrier_sync(id, kGroup);
      }
    });
    for (int i = 0; i < 4 * kGroup; ++i) {
      const int group = i / kGroup;
      if (!(out[i] == static_cast<float>(group * kGroup + kGroup - 1 - i % kGroup + group)))
        fail("numbers reversed in groups");
    }
  }
}

enum class Handover { kRight, kNoArrival, kNoWait, kTwice };

// The first warp leaves numbers to the second and goes on with its own work, which never waits.
void hand_over(Handover handover) {
  std::vector<float> out(32, NAN);
  for (simt::Schedule schedule = 0; schedule < 6; ++schedule) {
    simt::launch(one_block(kThreads * sizeof(float), schedule), [&] {
      const int i = threadIdx.x;
      if (i < 32) {
        smem()[i] = static_cast<float>(i);
        if (handover != Handover::kNoArrival) ptx::barrier_arrive(1, kThreads);
        if (handover == Handover::kTwice) ptx::barrier_arrive(1, kThreads);
        smem()[32 + i] = 1.0f;
      } else {
        if (handover != Handover::kNoWait) ptx::barrier_sync(1, kThreads);
        out[i - 32] = smem()[i - 32];
      }
    });
    for (int i = 0; i < 32; ++i) {
      if (out[i] != static_cast<float>(i)) fail("numbers handed over");
    }
  }
}

// Threads from kFirst on meet at a barrier of kCount.
template <int kFirst, int kCount>
void lone_barrier() {
  simt::launch(one_block(0), [&] {
    if (threadIdx.x >= kFirst) ptx::barrier_sync(1, kCount);
  });
}

void differing_barrier() {
  simt::launch(one_block(0), [&] { ptx::barrier_sync(1, threadIdx.x < 32 ? 64 : 32); });
}

void missing_lane() {
  simt::launch(one_block(0), [&] {
    if (threadIdx.x == 5) return;
    __shfl_xor_sync(0xFFFFFFFFu, 1.0f, 1);
  });
}

void lane_outside_mask() {
  simt::launch(one_block(0), [&] { __shfl_sync(0xFFFFu, 1.0f, 0); });
}

void shuffles() {
  bool right = true;
  simt::launch(one_block(0, 3), [&] {
    const int i = threadIdx.x, lane = i % 32;
    bool ok = __shfl_sync(~0u, i, 3) == i - lane + 3;
    ok &= __shfl_xor_sync(~0u, static_cast<float>(i), 5) == static_cast<float>(i ^ 5);
    ok &= __shfl_down_sync(~0u, i, 8) == (lane < 24 ? i + 8 : i);
    ok &= __shfl_up_sync(~0u, i, 8) == (lane >= 8 ? i - 8 : i);
    ok &= __ffs(0) == 0 && __ffs(0x50) == 5;
    ok &= __shfl_sync(~0u, lane, 1, 8) == lane / 8 * 8 + 1;
    ok &= __ballot_sync(~0u, lane < 4) == 15u;
    ok &= __any_sync(~0u, lane == 31) && !__all_sync(~0u, lane == 31);
    if (lane < 16) ok &= __shfl_xor_sync(0xFFFFu, lane, 8) == (lane ^ 8);
    if (!ok) right = false;
  });
  if (!right) fail("shuffles and votes");
}

// A lane's plain stores, read by the other lanes: a shuffle in between orders nothing, __syncwarp
// does.
void warp_exchange(bool sync) {
  std::vector<float> out(kThreads, NAN);
  simt::launch(one_block(kThreads * sizeof(float)), [&] {
    const int i = threadIdx.x;
    smem()[i] = static_cast<float>(i);
    if (sync) {
      __syncwarp();
    } else {
      __shfl_xor_sync(0xFFFFFFFFu, 1.0f, 1);
    }
    out[i] = smem()[i ^ 1];
  });
  for (int i = 0; i < kThreads; ++i) {
    if (out[i] != static_cast<float>(i ^ 1)) fail("exchanged numbers");
  }
}

void two_blocks_one_address() {
  float out = 0.0f;
  simt::launch({dim3(2), dim3(kThreads), 0, 0}, [&] {
    if (threadIdx.x == blockIdx.x) out = 1.0f;
  });
}

enum class GridAhead { kWait, kOneThread, kNone, kLateWait, kEarlyStart };

// The grid ahead writes `in`; blocks copy it, by cp.async or by loads.
void dependent_grid(GridAhead kind, bool asynchronous) {
  std::vector<float> in(kThreads), out(kThreads, NAN);
  simt::Launch launch = one_block(kThreads * sizeof(float), 1);
  launch.grid_ahead = [](void* context) {
    float* x = static_cast<float*>(context);
    for (int i = 0; i < kThreads; ++i) x[i] = static_cast<float>(i);
  };
  launch.grid_ahead_context = in.data();
  simt::launch(launch, [&] {
    const int i = threadIdx.x;
    const bool waits = kind == GridAhead::kOneThread ? i == 0 : kind != GridAhead::kNone;
    if (kind == GridAhead::kEarlyStart) ptx::let_next_grid_start();
    if (waits && kind != GridAhead::kLateWait) ptx::wait_for_grids_ahead();
    if (kind == GridAhead::kWait) ptx::let_next_grid_start();
    if (asynchronous) {
      ptx::cp_async<4>(smem() + i, &in[i], true);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
    } else {
      smem()[i] = in[i];
    }
    out[i] = smem()[i];
    if (kind == GridAhead::kLateWait) ptx::wait_for_grids_ahead();
  });
  if (out[5] != 5.0f) fail("numbers of the grid ahead");
}

enum class Cluster { kRight, kNoFirst, kNoLast, kOneBlockAlone, kOutside };

// Each thread of a block of four adds up what those of its number have left in their shared memory.
void cluster(Cluster kind) {
  constexpr int kBlocks = 4;
  std::vector<float> out(2 * kBlocks * kThreads, NAN);
  for (const simt::Schedule schedule : {0, 1, 3}) {
    simt::Launch launch{dim3(2 * kBlocks), dim3(kThreads), kThreads * 2 * sizeof(float), schedule};
    launch.cluster_size = kBlocks;
    simt::launch(launch, [&] {
      const int i = threadIdx.x, rank = blockIdx.x % kBlocks;
      smem()[2 * i] = static_cast<float>(i), smem()[2 * i + 1] = static_cast<float>(blockIdx.x);
      if (kind == Cluster::kOneBlockAlone && rank > 0) return;
      if (kind != Cluster::kNoFirst) ptx::cluster_sync();
      float sum = 0.0f;
      for (unsigned from = 0; from < kBlocks + (kind == Cluster::kOutside); ++from) {
        float x[2];
        ptx::load_of_block(x, ptx::smem_address(smem() + 2 * i), from);
        sum += x[0] * x[1];
      }
      out[blockIdx.x * kThreads + i] = sum;
      if (kind != Cluster::kNoLast) ptx::cluster_leave();
    });
  }
  if (out[5] != 5.0f * (0 + 1 + 2 + 3) || out[7 * kThreads + 9] != 9.0f * (4 + 5 + 6 + 7))
    fail("sums of a cluster");
}

template <typename T>
T number(int i) {
  return static_cast<T>(static_cast<float>(i % 11 - 5) * 0.25f);
}

struct WmmaBugs {
  int ld_offset = 0;
  int pointer_offset = 0;
  bool no_sync_before_load = false;
  bool no_sync_after_store = false;
  bool no_fill = false;
  bool wrong_layout = false;
  bool assumes_places = false;
};

// c = a b^T by one warp; a and b are rows of 16 elements of T with 24 from row to row.
template <typename T>
void product(const WmmaBugs& bugs, simt::Schedule schedule = 0) {
  constexpr int kLd = 24, kLdC = 20;
  std::vector<float> out(256, NAN);
  simt::launch({dim3(1), dim3(32), 32 * kLd * sizeof(T) + 16 * kLdC * sizeof(float) + 32, schedule},
               [&] {
                 T* a = smem<T>();
                 T* b = a + 16 * kLd;
                 float* c = reinterpret_cast<float*>(b + 16 * kLd);
                 const int lane = threadIdx.x;
                 for (int i = lane; i < 256; i += 32) {
                   a[i / 16 * kLd + i % 16] = number<T>(7 * i + 3);
                   b[i / 16 * kLd + i % 16] = number<T>(5 * i + 1);
                 }
                 if (!bugs.no_sync_before_load) __syncwarp();
                 wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> rA;
                 wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major> rB;
                 wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major> wrong;
                 wmma::fragment<wmma::accumulator, 16, 16, 16, float> rC;
                 if (!bugs.no_fill) wmma::fill_fragment(rC, 0.0f);
                 wmma::load_matrix_sync(rA, a + bugs.pointer_offset, kLd);
                 wmma::load_matrix_sync(rB, b, kLd + bugs.ld_offset);
                 wmma::load_matrix_sync(wrong, b, kLd);
                 if (bugs.wrong_layout) {
                   wmma::mma_sync(rC, rA, wrong, rC);
                 } else {
                   wmma::mma_sync(rC, rA, rB, rC);
                 }
                 for (float& x : rC.x) x *= 2.0f;
                 if (bugs.assumes_places) rC.x[0] = lane < 8 ? 0.0f : rC.x[0];
                 wmma::store_matrix_sync(c, rC, kLdC, wmma::mem_row_major);
                 if (!bugs.no_sync_after_store) __syncwarp();
                 for (int i = lane; i < 256; i += 32) out[i] = c[i / 16 * kLdC + i % 16];
               });
  for (int i = 0; i < 256; ++i) {
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) {
      sum += static_cast<float>(number<T>(7 * (i / 16 * 16 + k) + 3)) *
             static_cast<float>(number<T>(5 * (i % 16 * 16 + k) + 1));
    }
    if (!(out[i] == 2.0f * sum)) fail("matrix product");
  }
}

// Sums six tiles that pass through a ring of two stages, each with an mbarrier for "full" and one
// for "empty".
enum class Ring { kRight, kNoInit, kNoFull, kNoEmpty, kNoRelease, kWrongParity, kManyArrivals };

void ring(Ring bug, simt::Schedule schedule = 0) {
  constexpr int kTiles = 6, kTile = kThreads * 4, kBarriers = 2 * kTile * 4;  // floats, bytes
  std::vector<float> in(kTiles * kTile), out(kThreads, 0.0f);
  for (int i = 0; i < kTiles * kTile; ++i) in[i] = 1.0f + i % 7;
  simt::launch(one_block(kBarriers + 32, schedule), [&] {
    const int thread = threadIdx.x;
    const auto full = [&](int i) { return ptx::smem_address(smem()) + kBarriers + i % 2 * 16; };
    const auto empty = [&](int i) { return full(i) + 8; };
    const auto copy = [&](int i) {
      if (i >= kTiles) return;
      if (i >= 2 && bug != Ring::kNoEmpty) ptx::mbarrier_wait(empty(i), (i / 2 + 1) % 2);
      ptx::cp_async<16>(smem() + i % 2 * kTile + thread * 4, &in[i * kTile + thread * 4], true);
      ptx::mbarrier_arrive_after_copies(full(i));
    };
    if (thread == 0 && bug != Ring::kNoInit) {
      for (int i = 0; i < 2; ++i) {
        ptx::mbarrier_init(full(i), kThreads - (bug == Ring::kManyArrivals));
        ptx::mbarrier_init(empty(i), kThreads / 32);
      }
    }
    __syncthreads();
    copy(0);
    for (int i = 0; i < kTiles; ++i) {
      copy(i + 1);
      if (bug != Ring::kNoFull || i != kTiles - 2 || thread < 32)
        ptx::mbarrier_wait(full(i), (i / 2 + (bug == Ring::kWrongParity)) % 2);
      for (int j = 0; j < 4; ++j)
        out[thread] += smem()[i % 2 * kTile + (thread * 4 + 80 + j) % kTile];
      __syncwarp();
      if (thread % 32 == 0 && bug != Ring::kNoRelease) ptx::mbarrier_arrive(empty(i));
    }
  });
  for (int thread = 0; thread < kThreads; ++thread) {
    float sum = 0.0f;
    for (int i = 0; i < kTiles; ++i) {
      for (int j = 0; j < 4; ++j) sum += in[i * kTile + (thread * 4 + 80 + j) % kTile];
    }
    if (out[thread] != sum) fail("the sum of a ring's tiles");
  }
}

void divergent_wmma() {
  simt::launch({dim3(1), dim3(32), 1024, 0}, [&] {
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> f;
    wmma::fill_fragment(f, 0.0f);
    wmma::store_matrix_sync(smem() + (threadIdx.x < 16 ? 0 : 8), f, 16, wmma::mem_row_major);
  });
}

WmmaBugs bugs(void (*set)(WmmaBugs&)) {
  WmmaBugs b;
  set(b);
  return b;
}

const std::vector<Case> kCases = {
    {"reverse", [] { reverse(true); }, nullptr},
    {"reverse without __syncthreads", [] { reverse(false); }, kTsan ? kRace : kWrong},
    {"store of half without __syncthreads", converted_store<half>, kTsan ? kRace : kWrong},
    {"store of bfloat16 without __syncthreads", converted_store<__nv_bfloat16>,
     kTsan ? kRace : kWrong},
    {"two rounds", [] { two_rounds(true); }, nullptr},
    {"two rounds without the second __syncthreads", [] { two_rounds(false); }, kRace, kTsan},
    {"cp.async", [] { async_copies(Wait::kRight, true); }, nullptr},
    {"cp.async without a wait", [] { async_copies(Wait::kNone, true); }, "never waited for"},
    {"cp.async with one group too few", [] { async_copies(Wait::kTooFew, true); },
     kTsan ? kRace : kWrong},
    {"cp.async without a barrier", [] { async_copies(Wait::kRight, false); },
     kTsan ? kRace : kWrong},
    {"cp.async from an odd address", [] { async_copies(Wait::kRight, true, 1); }, "not a multiple"},
    {"cp.async after a barrier", [] { early_copy(true); }, nullptr},
    {"cp.async into a buffer still read", [] { early_copy(false); }, kTsan ? kRace : kWrong},
    {"cp.async at the end", [] { unwaited_copy(); }, "never waited for"},
    {"cp.async to global memory", copy_outside_smem, "not in shared memory"},
    {"load_matrix past shared memory", load_matrix_past_smem, "not all of them in shared memory"},
    {"shared memory to its end", [] { smem_bounds(0); }, nullptr},
    {"shared memory past its end", [] { smem_bounds(1); },
     kAsan ? "AddressSanitizer: use-after-poison" : "outside the 252 bytes"},
    {"shared memory before it is written", uninitialised_smem, kWrong},
    {"a local variable before it is written", uninitialised_local, kWrong},
    {"divergent __syncthreads", divergent_barrier, "different __syncthreads"},
    {"exit before __syncthreads", exit_before_barrier,
     "after some threads of the block have ended"},
    {"groups with barriers of their own", [] { reverse_in_groups(Groups::kRight); }, nullptr},
    {"groups without the barrier between", [] { reverse_in_groups(Groups::kNoBarrier); },
     kTsan ? kRace : kWrong},
    {"groups with one barrier for all", [] { reverse_in_groups(Groups::kOneBarrier); },
     kTsan ? kRace : kWrong},
    {"groups without the barrier behind", [] { reverse_in_groups(Groups::kUneven); }, kRace, kTsan},
    {"bar.arrive", [] { hand_over(Handover::kRight); }, nullptr},
    {"bar.sync without bar.arrive", [] { hand_over(Handover::kNoArrival); }, "never reach"},
    {"bar.arrive without bar.sync", [] { hand_over(Handover::kNoWait); },
     kTsan ? kRace : "never opened"},
    {"bar.arrive twice", [] { hand_over(Handover::kTwice); }, "never reach"},
    {"bar.sync of all", lone_barrier<0, 64>, nullptr},
    {"bar.sync that one warp does not reach", lone_barrier<32, 64>, "never reach"},
    {"bar.sync of a part of a warp", lone_barrier<48, 32>, "never reach"},
    {"bar.sync of more than it asks for", lone_barrier<16, 32>, "more threads meet"},
    {"bar.sync of no whole warps", lone_barrier<0, 48>, "not a number of warps"},
    {"bar.sync of different numbers", differing_barrier, "different numbers"},
    {"ring of mbarriers",
     [] {
       for (int s = 0; s < 5; ++s) ring(Ring::kRight, s);
     },
     nullptr},
    {"mbarriers that nobody initialises", [] { ring(Ring::kNoInit); }, "not initialised"},
    {"ring without a wait for a full stage", [] { ring(Ring::kNoFull); }, kTsan ? kRace : kWrong},
    {"ring without waits for empty stages", [] { ring(Ring::kNoEmpty); }, kTsan ? kRace : kWrong},
    {"ring whose stages are never released", [] { ring(Ring::kNoRelease); }, "never reach"},
    {"ring with the wrong parity", [] { ring(Ring::kWrongParity); }, "more arrivals"},
    {"more arrivals than an mbarrier takes", [] { ring(Ring::kManyArrivals); }, "more arrivals"},
    {"a wait for the grid ahead", [] { dependent_grid(GridAhead::kWait, true); }, nullptr},
    {"no wait for the grid ahead", [] { dependent_grid(GridAhead::kNone, false); },
     kTsan ? kRace : "without waiting for the grids ahead"},
    {"a wait of one thread alone", [] { dependent_grid(GridAhead::kOneThread, false); },
     kTsan ? kRace : "without waiting for the grids ahead"},
    {"loads before the wait", [] { dependent_grid(GridAhead::kLateWait, false); }, kRace, kTsan},
    {"cp.async before the wait", [] { dependent_grid(GridAhead::kLateWait, true); },
     "before the wait for the grids ahead"},
    {"start of the next grid before the wait", [] { dependent_grid(GridAhead::kEarlyStart, true); },
     "before griddepcontrol.wait"},
    {"cluster", [] { cluster(Cluster::kRight); }, nullptr},
    {"cluster without a barrier before its loads", [] { cluster(Cluster::kNoFirst); },
     kTsan ? kRace : kWrong, !kAsan},
    {"cluster without a barrier behind its loads", [] { cluster(Cluster::kNoLast); },
     "some of whose threads have ended"},
    {"barrier of a cluster that one block reaches", [] { cluster(Cluster::kOneBlockAlone); },
     "after some of its threads have ended"},
    {"block that a cluster has not", [] { cluster(Cluster::kOutside); },
     "block 4 of a cluster of 4"},
    {"shuffle without one lane", missing_lane, "never reach"},
    {"shuffle from outside its mask", lane_outside_mask, "leaves out the calling lane"},
    {"shuffles and votes", shuffles, nullptr},
    {"exchange within a warp", [] { warp_exchange(true); }, nullptr},
    {"exchange within a warp without __syncwarp", [] { warp_exchange(false); }, kRace, kTsan},
    {"two blocks write one address", two_blocks_one_address, kRace, kTsan},
    {"accumulator of e4m3", e4m3_accumulator, nullptr},
    {"accumulator of e4m3 in fp16", e4m3_half_accumulator, nullptr},
    {"wmma half",
     [] {
       for (int s = 0; s < 5; ++s) product<half>({}, s);
     },
     nullptr},
    {"wmma bfloat16",
     [] {
       for (int s = 0; s < 5; ++s) product<__nv_bfloat16>({}, s);
     },
     nullptr},
    {"wmma ldm below 16", [] { product<half>(bugs([](WmmaBugs& b) { b.ld_offset = -16; })); },
     "less than 16"},
    {"wmma ldm of 12 elements", [] { product<half>(bugs([](WmmaBugs& b) { b.ld_offset = -12; })); },
     "not a multiple of 16 bytes"},
    {"wmma wrong ldm", [] { product<half>(bugs([](WmmaBugs& b) { b.ld_offset = -8; })); }, kWrong},
    {"wmma pointer of 16 bytes",
     [] { product<half>(bugs([](WmmaBugs& b) { b.pointer_offset = 8; })); },
     "not a multiple of 32 bytes"},
    {"wmma without fill_fragment",
     [] { product<half>(bugs([](WmmaBugs& b) { b.no_fill = true; })); }, kWrong},
    {"wmma row for column", [] { product<half>(bugs([](WmmaBugs& b) { b.wrong_layout = true; })); },
     kWrong},
    {"wmma layout assumed",
     [] { product<half>(bugs([](WmmaBugs& b) { b.assumes_places = true; })); }, kWrong},
    {"wmma load without __syncwarp",
     [] { product<half>(bugs([](WmmaBugs& b) { b.no_sync_before_load = true; })); }, kRace, kTsan},
    {"wmma store without __syncwarp",
     [] { product<half>(bugs([](WmmaBugs& b) { b.no_sync_after_store = true; })); }, kRace, kTsan},
    {"wmma lanes disagree", divergent_wmma, "different arguments"},
};

}  // namespace

int main(int argc, char** argv) {
  return run_self_tests(kCases, argc, argv);
}
