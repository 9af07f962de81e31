#pragma once

#include <cstdint>

#include "cuda/plan/tile_config.h"
#include "cuda/tile/wgmma/warpgroup.h"

// The tile shapes: heads of up to 320, 384 or 512 columns, of which two consumers have half each.
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
constexpr int kNumThreads = (1 + kConsumers) * kWarpgroupThreads;
// Per thread; together no more than the block has at launch.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// Q lies in shared memory in blocks of 64 rows by 64 columns. K and V come in slots as large: one
// of K has 64 columns of all keys of a tile; one of V, what a consumer multiplies in a step along
// the keys, 16 keys of its half of the columns, in blocks of 64 columns too.
constexpr int kBlockColumns = 64;
constexpr int kStepKeys = 16;
constexpr int kSteps = kBlockN / kStepKeys;
constexpr int kSlotBytes = kBlockN * kBlockRowBytes;
constexpr int kStepBlockBytes = kStepKeys * kBlockRowBytes;
static_assert(kRows == kBlockN);

// By the columns of a tile: those of out that a consumer has, in whole blocks; the slots of a tile
// of K; the slots of each consumer.
constexpr int half_of(int tile) {
  return (tile / kBlockColumns + kConsumers - 1) / kConsumers * kBlockColumns;
}
constexpr int key_slots(int tile) {
  return tile / kBlockColumns;
}
constexpr int num_slots(int tile) {
  return tile > 384 ? 9 : 10;
}
constexpr bool fits(int tile) {
  return half_of(tile) / kBlockColumns * kStepBlockBytes <= kSlotBytes &&
         num_slots(tile) >= key_slots(tile);  // keys are released when all scores are started
}
static_assert(fits(320) && fits(384) && fits(kMostColumns) && kMostColumns == 512);

// Byte offsets into dynamic shared memory.
struct SmemMap {
  int slots;          // [kConsumers][kSlots], behind Q
  int probabilities;  // [kConsumers] tiles of 64 rows by 64 keys
  int mbarriers;      // Q's; of each consumer full [kSlots], empty [kSlots]
  int row_max;        // [kConsumers][kRows] floats
  int row_sum;        // the same
  int total;
};

constexpr SmemMap smem_map(int tile) {
  const int slots = num_slots(tile);
  SmemMap map{};
  map.slots = key_slots(tile) * kSlotBytes;
  map.probabilities = map.slots + kConsumers * slots * kSlotBytes;
  map.mbarriers = map.probabilities + kConsumers * kSlotBytes;
  map.row_max = map.mbarriers + (1 + 2 * kConsumers * slots) * 8;
  map.row_sum = map.row_max + kConsumers * kRows * 4;
  map.total = map.row_sum + kConsumers * kRows * 4;
  return map;
}
static_assert(smem_map(320).total <= 227 * 1024 && smem_map(384).total <= 227 * 1024 &&
              smem_map(512).total <= 227 * 1024);

constexpr TileConfig tile_config(int tile) {
  return {kBlockM, kBlockN, kNumThreads / 32, 1, smem_map(tile).total};
}

}  // namespace dlattn::sm90_wide
