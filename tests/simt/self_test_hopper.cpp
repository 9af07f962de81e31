// Does the harness see misuse of Hopper's instructions?
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/counter.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/reduce_vector.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "harness/launch.h"
#include "self_test.h"

namespace ptx = dlattn::ptx;
using namespace simt::self_test;

namespace {

constexpr int kTile = 64, kTileBytes = kTile * kTile * 2;
constexpr int kStages = 2, kTiles = 5;

enum class Bug {
  kNone,
  kNoInitFence,
  kFewBytes,
  kManyBytes,
  kNoFullWait,
  kNoFullWaitOfOneWarp,
  kNoEmptyWait,
  kEarlyRelease,
  kWrongParity,
  kNoWgmmaFence,
  kNoWgmmaWait,
  kEarlyRead,
  kEarlyWrite,
  kChangedA,
  kOneWarpLess,
  kEarlyOverwrite,
  kNoProxyFence,
  kNoBarrierBeforeStore,
  kNoStoreWait,
  kChangedSource,
  kStoreBeyondSmem,
  kStoreBeforeTensor,
  kLoadOffItsAtom,
  kLoadAtOddColumn,
  kNoWaitForTurn,
  kTurnNotPassedOn,
  kNoReleaseToOther,
  kNoWaitForOther,
  kEndsEarly,
};

ptx::TensorMap tile_map(half* data, int rows, int rows_of_tensor) {
  simt::TensorMap map{};
  map.address = reinterpret_cast<unsigned char*>(data);
  map.rank = 4;
  map.element_bytes = 2;
  map.swizzle = 128;
  const std::uint32_t sizes[] = {kTile, static_cast<std::uint32_t>(rows_of_tensor), 1, 1};
  for (int i = 0; i < 4; ++i) {
    map.sizes[i] = sizes[i];
    map.strides[i] = i == 0 ? 2 : 128 * (i == 1 ? 1 : rows_of_tensor);
    map.box[i] = 1;
  }
  map.box[0] = kTile, map.box[1] = static_cast<std::uint16_t>(rows);
  ptx::TensorMap encoded;
  std::memcpy(encoded.encoded, &map, sizeof map);
  return encoded;
}

// The producer's warpgroup: its first thread loads a, then the tiles of b through a ring.
struct Barriers {
  ptx::SmemAddress base;
  ptx::SmemAddress a() const { return base; }
  ptx::SmemAddress full(int i) const { return base + 8 + i % kStages * 8; }
  ptx::SmemAddress empty(int i) const { return full(i) + 8 * kStages; }
};
struct Operands {
  ptx::TensorMap a, b, out;
};

void produce(const Operands& maps, Barriers barriers, ptx::SmemAddress tiles, Bug bug) {
  ptx::mbarrier_arrive_expect_tx(barriers.a(), kTileBytes);
  ptx::tma_load(tiles + (bug == Bug::kLoadOffItsAtom ? 256 : 0), maps.a, barriers.a(),
                {bug == Bug::kLoadAtOddColumn ? 4 : 0, 0, 0, 0});
  for (int i = 0; i < kTiles; ++i) {
    if (bug != Bug::kNoEmptyWait) ptx::mbarrier_sleep(barriers.empty(i), (i / kStages + 1) % 2);
    const int wrong = bug == Bug::kFewBytes ? -16 : bug == Bug::kManyBytes ? 16 : 0;
    ptx::mbarrier_arrive_expect_tx(barriers.full(i), kTileBytes + wrong);
    ptx::tma_load(tiles + (1 + i % kStages) * kTileBytes, maps.b, barriers.full(i),
                  {0, i * kTile, 0, 0});
  }
}

// The other warpgroup's: d += a b^T of all tiles.
void consume(float (&d)[32], Barriers barriers, ptx::SmemAddress tiles, Bug bug) {
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const bool releases = threadIdx.x % 32 == 0;
  ptx::mbarrier_sleep(barriers.a(), 0);
  for (int i = 0; i < kTiles; ++i) {
    const bool late = bug == Bug::kNoFullWait || (bug == Bug::kNoFullWaitOfOneWarp && warp == 2);
    if (!late || i < kTiles - 1)
      ptx::mbarrier_sleep(barriers.full(i), (i / kStages + (bug == Bug::kWrongParity)) % 2);
    const std::uint64_t a = ptx::wgmma_descriptor(tiles, 0);
    const std::uint64_t b = ptx::wgmma_descriptor(tiles + (1 + i % kStages) * kTileBytes, 0);
    if (bug != Bug::kNoWgmmaFence) ptx::wgmma_fence();
    for (int k = 0; k < kTile / 16; ++k) {
      if (bug == Bug::kOneWarpLess && i == 2 && k == 3 && warp == 3) continue;
      ptx::wgmma_ss<half, false>(d, ptx::wgmma_advance(a, 32 * k), ptx::wgmma_advance(b, 32 * k),
                                 i > 0 || k > 0);
    }
    ptx::wgmma_commit();
    if (releases && bug == Bug::kEarlyRelease) ptx::mbarrier_arrive(barriers.empty(i));
    if (bug == Bug::kEarlyRelease) __shfl_sync(0xFFFFFFFFu, 0, 0);
    if (bug == Bug::kEarlyRead && i == kTiles - 1) {
      const float early = d[3];
      ptx::wgmma_wait<0>();
      d[3] = early;
    }
    if (bug == Bug::kEarlyWrite) d[3] = 0.0f;
    if (bug != Bug::kNoWgmmaWait) ptx::wgmma_wait<0>();
    if (releases && bug != Bug::kEarlyRelease) ptx::mbarrier_arrive(barriers.empty(i));
  }
}

// Rounds d to half where a was, and stores that.
void store(const float (&d)[32], const Operands& maps, ptx::SmemAddress tile, Bug bug) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  for (int k = 0; k < kTile / 16; ++k) {
    std::uint32_t r[4];
    for (int i = 0; i < 4; ++i) {
      const half2 pair = __floats2half2_rn(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
      std::memcpy(&r[i], &pair, 4);
    }
    const int row = thread / 32 * 16 + lane % 16, chunk = 2 * k + lane / 16;
    ptx::stmatrix_x4(tile + row * 128 + (chunk ^ row % 8) * 16, r);
  }
  if (bug != Bug::kNoProxyFence) ptx::fence_proxy_async();
  if (bug != Bug::kNoBarrierBeforeStore) ptx::barrier_sync(1, 128);
  if (thread != 0) return;
  ptx::tma_store(maps.out, tile + (bug == Bug::kStoreBeyondSmem ? 3 * kTileBytes : 0),
                 {0, bug == Bug::kStoreBeforeTensor ? -1 : 0, 0, 0});
  ptx::tma_store_commit();
  if (bug == Bug::kChangedSource) ptx::at_smem_address(tile)[5] ^= 1;
  if (bug != Bug::kNoStoreWait) ptx::tma_store_wait_read();
}

// out = a (the sum of b's tiles)^T, of 64 x 64 matrices of which out has 50 rows.
void multiply(Bug bug, simt::Schedule schedule = 0) {
  constexpr int kRowsOut = 50;
  alignas(16) static half a[kTile * kTile], b[kTiles * kTile * kTile], out[kTile * kTile];
  for (int i = 0; i < kTile * kTile; ++i) a[i] = __float2half(static_cast<float>(i * 5 % 7 - 3));
  for (int i = 0; i < kTiles * kTile * kTile; ++i)
    b[i] = __float2half(static_cast<float>(i * 11 % 5 - 2));
  for (half& x : out) x = __float2half(-1.0f);
  const Operands maps{tile_map(a, kTile, kTile), tile_map(b, kTile, kTiles * kTile),
                      tile_map(out, kTile, kRowsOut)};
  simt::launch({dim3(1), dim3(256), 1024 + 3 * kTileBytes, schedule}, [&] {
    const ptx::SmemAddress base = ptx::smem_address(ptx::dynamic_smem()), tiles = base + 1024;
    const Barriers barriers{base};
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(barriers.a(), 1);
      for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(barriers.full(i), 1);
        ptx::mbarrier_init(barriers.empty(i), 4);
      }
      if (bug != Bug::kNoInitFence) ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      if (threadIdx.x == 0) produce(maps, barriers, tiles, bug);
      return;
    }
    float d[32];
    consume(d, barriers, tiles, bug);
    if (bug != Bug::kEarlyOverwrite) ptx::barrier_sync(2, 128);
    store(d, maps, tiles, bug);
  });
  for (int i = 0; i < kTile * kTile; ++i) {
    float sum = 0.0f;
    for (int k = 0; k < kTiles * kTile; ++k)
      sum += __half2float(a[i / kTile * kTile + k % kTile]) *
             __half2float(b[(k / kTile * kTile + i % kTile) * kTile + k % kTile]);
    if (i >= kRowsOut * kTile) sum = -1.0f;
    if (!(__half2float(out[i]) == sum)) fail("a product of tiles");
  }
}

// a in registers, b written by the threads; two products into one set of accumulators.
void multiply_registers(Bug bug) {
  std::vector<float> out(128 * 32);
  simt::launch({dim3(1), dim3(128), kTileBytes, 0}, [&] {
    auto* b = reinterpret_cast<half*>(ptx::dynamic_smem());
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kTile; i += 128)
      b[i] = __float2half(1.0f);
    if (bug != Bug::kNoProxyFence) ptx::fence_proxy_async();
    __syncthreads();
    const std::uint64_t descriptor = ptx::wgmma_descriptor(ptx::smem_address(b), 0);
    std::uint32_t p[4] = {0x3C003C00u, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u};  // ones
    float d[32];
    for (float& x : d) x = 1.0f;
    ptx::wgmma_fence();
    for (int i = 0; i < 2; ++i) ptx::wgmma_rs<half, false>(d, p, descriptor, true);
    ptx::wgmma_commit();
    if (bug == Bug::kChangedA) p[2] = 0;
    ptx::wgmma_wait<0>();
    for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = d[i] + (p[2] == 1 ? 1.0f : 0.0f);
  });
  for (const float x : out) {
    if (x != 33.0f) fail("a product of registers");
  }
}

template <int kProducer, int kConsumer>
void share_registers(bool one_warp_only) {
  simt::launch({dim3(1), dim3(384), 0, 0}, [&] {
    if (threadIdx.x < 128) {
      ptx::lower_registers<kProducer>();
    } else if (!one_warp_only || threadIdx.x % 128 < 32) {
      ptx::raise_registers<kConsumer>();
    }
  });
}

// Blocks, two at once, add to one number in turns.
void add_in_turns(Bug bug, simt::Schedule schedule = 0) {
  alignas(16) static float sum[4];
  static unsigned tickets, turns;
  tickets = turns = 0, sum[0] = 0.0f;
  simt::Launch launch{dim3(6), dim3(32), 0, schedule};
  launch.cluster_size = 2;
  simt::launch(launch, [&] {
    if (threadIdx.x != 0) return;
    const unsigned ticket = ptx::take_ticket(&tickets);
    if (bug != Bug::kNoWaitForTurn) ptx::wait_for_counter(&turns, ticket);
    ptx::reduce_add_alone(sum, ptx::Float4{{static_cast<float>(ticket + 1)}});
    if (bug != Bug::kTurnNotPassedOn) ptx::raise_counter(&turns, ticket + 1);
  });
  if (sum[0] != 21.0f) fail("a sum in turns");
}

// Each block of a cluster copies every other tile to both, and a warp of each adds them up.
void share_copies(Bug bug, simt::Schedule schedule = 0) {
  constexpr int kRows = 8, kBytes = kRows * kTile * 2;
  alignas(16) static half tiles[kTiles * kRows * kTile];
  static float out[2][32];
  for (int i = 0; i < kTiles * kRows * kTile; ++i)
    tiles[i] = __float2half(static_cast<float>(i % 13 + i / (kRows * kTile)));
  const ptx::TensorMap map = tile_map(tiles, kRows, kTiles * kRows);
  simt::Launch launch{dim3(2), dim3(64), 1024 + kBytes, schedule};
  launch.cluster_size = 2;
  simt::launch(launch, [&] {
    const ptx::SmemAddress full = ptx::smem_address(ptx::dynamic_smem()), empty = full + 8;
    const ptx::SmemAddress slot = full + 1024;
    const unsigned rank = blockIdx.x, lane = threadIdx.x % 32;
    const bool own_alone = bug == Bug::kNoReleaseToOther || bug == Bug::kNoWaitForOther;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(full, 1);
      ptx::mbarrier_init(empty, bug == Bug::kNoWaitForOther ? 1 : 2);
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    if (threadIdx.x == 0) {
      for (int i = 0; i < kTiles; ++i) {
        ptx::mbarrier_sleep(empty, (i + 1) % 2);
        ptx::mbarrier_arrive_expect_tx(full, kBytes);
        if (i % 2 == static_cast<int>(rank))
          ptx::tma_load_to_blocks(slot, map, full, {0, i * kRows, 0, 0}, 3);
      }
    } else if (threadIdx.x >= 32) {
      float sum = 0.0f;
      for (int i = 0; i < kTiles; ++i) {
        ptx::mbarrier_sleep(full, i % 2);
        sum += __half2float(reinterpret_cast<const half*>(ptx::at_smem_address(slot))[lane]);
        __syncwarp();
        if (lane < 2 && (lane == rank || !own_alone)) ptx::mbarrier_arrive_at_block(empty, lane);
      }
      out[rank][lane] = sum;
    }
    if (bug != Bug::kEndsEarly) ptx::cluster_leave();
  });
  for (int lane = 0; lane < 32; ++lane) {
    float sum = 0.0f;
    for (int i = 0; i < kTiles; ++i) sum += __half2float(tiles[i * kRows * kTile + lane]);
    if (out[0][lane] != sum || out[1][lane] != sum) fail("a sum of shared copies");
  }
}

// A block of a cluster stores numbers in the other one's memory, which copies them back doubled.
void exchange(Bug bug, simt::Schedule schedule = 0) {
  static float out[32][4];
  simt::Launch launch{dim3(2), dim3(32), 1024 + 512, schedule};
  launch.cluster_size = 2;
  simt::launch(launch, [&] {
    const ptx::SmemAddress full = ptx::smem_address(ptx::dynamic_smem());
    const unsigned lane = threadIdx.x;
    const ptx::SmemAddress own = full + 1024 + 16 * lane;
    auto* numbers = reinterpret_cast<float*>(ptx::dynamic_smem() + 1024) + 4 * lane;
    if (lane == 0) {
      ptx::mbarrier_init(full, 1);
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, bug == Bug::kFewBytes ? 496 : 512);
    __syncwarp();
    if (blockIdx.x == 0) {
      const float sent[4] = {1.0f, 2.0f, 3.0f, static_cast<float>(lane)};
      std::uint32_t bits[4];
      std::memcpy(bits, sent, sizeof bits);
      ptx::store_at_block(own, bits, full, 1);
      if (bug != Bug::kNoFullWait) ptx::mbarrier_sleep(full, 0);
      for (int i = 0; i < 4; ++i) out[lane][i] = numbers[i];
    } else {
      if (bug != Bug::kNoWaitForOther) ptx::mbarrier_sleep(full, 0);
      for (int i = 0; i < 4; ++i) numbers[i] *= 2.0f;
      if (bug != Bug::kNoProxyFence) ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) ptx::copy_to_block(full + 1024, full + 1024, 512, full, 0);
      __syncwarp();
      if (bug == Bug::kChangedSource) numbers[0] = 0.0f;
    }
    ptx::cluster_leave();
  });
  for (int lane = 0; lane < 32; ++lane) {
    if (out[lane][1] != 4.0f || out[lane][3] != 2.0f * static_cast<float>(lane))
      fail("numbers sent to and fro");
  }
}

const std::vector<Case> kCases = {
    {"stores and copies between blocks of a cluster",
     [] {
       for (int s = 0; s < 5; ++s) exchange(Bug::kNone, s);
     },
     nullptr},
    {"more bytes stored in another block than it expects", [] { exchange(Bug::kFewBytes); },
     "that expects"},
    {"no wait for stores of another block",
     [] {
       for (int s = 0; s < 9; ++s) exchange(Bug::kNoWaitForOther, s);
     },
     kRace, kTsan},
    {"no wait for a copy of another block", [] { exchange(Bug::kNoFullWait); },
     "nobody waited for"},
    {"no fence before a copy to another block", [] { exchange(Bug::kNoProxyFence); },
     "without fence.proxy.async"},
    {"the source of a copy to another block that changes", [] { exchange(Bug::kChangedSource); },
     "the source of a bulk copy changed"},
    {"copies to both blocks of a cluster",
     [] {
       for (int s = 0; s < 5; ++s) share_copies(Bug::kNone, s);
     },
     nullptr},
    {"no release to the other block", [] { share_copies(Bug::kNoReleaseToOther); }, "never reach"},
    {"no wait for the other block",
     [] {
       for (int s = 0; s < 9; ++s) share_copies(Bug::kNoWaitForOther, s);
     },
     "copies bring 2048 bytes"},
    {"a block that ends while the other arrives", [] { share_copies(Bug::kEndsEarly); },
     "some of whose threads have ended"},
    {"sum in turns",
     [] {
       for (int s = 0; s < 4; ++s) add_in_turns(Bug::kNone, s);
     },
     nullptr},
    {"no wait for a turn", [] { add_in_turns(Bug::kNoWaitForTurn); }, kRace, kTsan},
    {"a turn that is not passed on", [] { add_in_turns(Bug::kTurnNotPassedOn); }, "never reach"},
    {"product of tiles",
     [] {
       for (int s = 0; s < (kTsan ? 2 : 5); ++s) multiply(Bug::kNone, s);
     },
     nullptr},
    {"no fence after mbarrier.init", [] { multiply(Bug::kNoInitFence); }, "without a fence after"},
    {"expect_tx of too few bytes", [] { multiply(Bug::kFewBytes); }, "that expects"},
    {"expect_tx of too many bytes", [] { multiply(Bug::kManyBytes); }, "lacks 8208 bytes"},
    {"no wait for a load", [] { multiply(Bug::kNoFullWait); }, "never reach"},
    {"no wait for a load by one warp", [] { multiply(Bug::kNoFullWaitOfOneWarp); },
     kTsan ? kRace : kWrong},
    {"no wait for an empty stage", [] { multiply(Bug::kNoEmptyWait); }, "last arrival"},
    {"stage released while wgmma reads it",
     [] {
       for (int s = 3; s < 23; s += 2) multiply(Bug::kEarlyRelease, s);
     },
     kTsan ? kRace : "in flight reads was written"},
    {"waits for the wrong parity", [] { multiply(Bug::kWrongParity); }, "never reach"},
    {"no wgmma.fence", [] { multiply(Bug::kNoWgmmaFence); }, "without wgmma.fence"},
    {"no wgmma.wait_group", [] { multiply(Bug::kNoWgmmaWait); }, "operations in flight"},
    {"accumulators read too early", [] { multiply(Bug::kEarlyRead); }, kWrong},
    {"accumulators written too early", [] { multiply(Bug::kEarlyWrite); }, "were written"},
    {"one warp without a wgmma", [] { multiply(Bug::kOneWarpLess); }, "of a warpgroup"},
    {"operand a overwritten while another warp may read it",
     [] { multiply(Bug::kEarlyOverwrite, 3); }, kRace, kTsan},
    {"store without fence.proxy.async", [] { multiply(Bug::kNoProxyFence); },
     "without fence.proxy.async"},
    {"store without a barrier", [] { multiply(Bug::kNoBarrierBeforeStore); },
     kTsan ? kRace : kWrong},
    {"store that is not waited for", [] { multiply(Bug::kNoStoreWait); }, "never waited for"},
    {"store whose source changes", [] { multiply(Bug::kChangedSource); }, "source of a bulk store"},
    {"store from beyond shared memory", [] { multiply(Bug::kStoreBeyondSmem); },
     "beyond shared memory"},
    {"store at a negative row", [] { multiply(Bug::kStoreBeforeTensor); }, "a coordinate of -1"},
    {"load to the midst of a swizzle", [] { multiply(Bug::kLoadOffItsAtom); }, "not a multiple"},
    {"load at an odd column", [] { multiply(Bug::kLoadAtOddColumn); }, "midst of 16 bytes"},
    {"product of registers", [] { multiply_registers(Bug::kNone); }, nullptr},
    {"registers of a changed too early", [] { multiply_registers(Bug::kChangedA); },
     "registers of a"},
    {"wgmma without fence.proxy.async", [] { multiply_registers(Bug::kNoProxyFence); },
     "without fence.proxy.async"},
    {"setmaxnreg", [] { share_registers<24, 240>(false); }, nullptr},
    {"setmaxnreg of too many", [] { share_registers<40, 240>(false); }, "the block has 64512"},
    {"setmaxnreg by one warp", [] { share_registers<24, 240>(true); }, "different numbers"},
};

}  // namespace

int main(int argc, char** argv) {
  return run_self_tests(kCases, argc, argv);
}
