#pragma once

#include <cstdint>

#include "cuda/plan/tile_config.h"
#include "cuda/tile/wgmma/warpgroup.h"

// The one tile shape: heads of up to 512 columns, of which two consumers have half each.
namespace dlattn::sm90_wide {

using tile::wgmma::kBlockRowBytes;
using tile::wgmma::kWarpgroupThreads;

constexpr int kElementBytes = 2;   // float16 or bfloat16
constexpr int kMostOfSm90 = 256;   // head dims up to this are left to sm90
constexpr int kMostColumns = 512;  // of q, k, v and out

constexpr int kClusterBlocks = 2;                   // which share the copies of K and V
constexpr int kRows = tile::wgmma::kWarpgroupRows;  // query rows of a thread block
constexpr int kBlockM = kClusterBlocks * kRows;     // of a cluster: of a work tile
constexpr int kBlockN = 64;                         // keys of a tile
constexpr int kConsumers = 2;                       // warpgroups, for half of out's columns each
constexpr int kHalf = kMostColumns / kConsumers;
constexpr int kNumThreads = (1 + kConsumers) * kWarpgroupThreads;
// Per thread; together no more than the block has at launch.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// Q lies in shared memory in blocks of 64 rows by 64 columns. K and V come in slots as large: one
// of K has 64 columns of all keys of a tile; one of V, what a consumer multiplies in a step along
// the keys, 16 keys of its half of the columns, in blocks of 64 columns too.
constexpr int kBlockColumns = 64;
constexpr int kStepKeys = 16;
constexpr int kSteps = kBlockN / kStepKeys;
constexpr int kKeySlots = kMostColumns / kBlockColumns;  // of a tile
constexpr int kSlotBytes = kBlockN * kBlockRowBytes;
constexpr int kStepBlockBytes = kStepKeys * kBlockRowBytes;
constexpr int kQueryBytes = kKeySlots * kSlotBytes;
constexpr int kSlots = 9;  // of each consumer
static_assert(kHalf / kBlockColumns * kStepBlockBytes == kSlotBytes && kRows == kBlockN);
static_assert(kSlots >= kKeySlots, "a tile's keys are released when its scores are started");

// Byte offsets into dynamic shared memory.
struct SmemMap {
  int slots;          // [kConsumers][kSlots], behind Q
  int probabilities;  // [kConsumers] tiles of 64 rows by 64 keys
  int mbarriers;      // Q's; of each consumer full [kSlots], empty [kSlots]
  int row_max;        // [kConsumers][kRows] floats
  int row_sum;        // the same
  int total;
};

constexpr SmemMap smem_map() {
  SmemMap map{};
  map.slots = kQueryBytes;
  map.probabilities = map.slots + kConsumers * kSlots * kSlotBytes;
  map.mbarriers = map.probabilities + kConsumers * kSlotBytes;
  map.row_max = map.mbarriers + (1 + 2 * kConsumers * kSlots) * 8;
  map.row_sum = map.row_max + kConsumers * kRows * 4;
  map.total = map.row_sum + kConsumers * kRows * 4;
  return map;
}
static_assert(smem_map().total <= 227 * 1024);

constexpr TileConfig tile_config(int) {
  return {kBlockM, kBlockN, kNumThreads / 32, 1, smem_map().total};
}

}  // namespace dlattn::sm90_wide
