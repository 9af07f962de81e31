#pragma once

#include <cstdint>

#include "cuda/plan/tile_config.h"
#include "cuda/tile/key_parts/workspace.h"
#include "cuda/tile/wgmma/warpgroup.h"

// Tile shapes: latents of up to 576 columns, of which the first ones, up to 512, are V.
namespace dlattn::sm90_latent {

using namespace tile::key_parts;  // how the keys are partitioned, and parts added up
using tile::wgmma::kBlockRowBytes;
using tile::wgmma::kWarpgroupThreads;

constexpr int kElementBytes = 2;                      // float16 or bfloat16
constexpr int kBlockM = tile::wgmma::kWarpgroupRows;  // rows of a KV head, of all its query heads
constexpr int kBlockN = 64;                           // keys of a tile
constexpr int kStages = 2;
constexpr int kConsumers = 2;  // warpgroups, each of which has half of the columns of out
constexpr int kHalf = kWideValues / kConsumers;
constexpr int kNumThreads = (1 + kConsumers) * kWarpgroupThreads;
// Per thread; together no more than the block has at launch.
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

// Tiles lie in shared memory in blocks of 64 rows by so many columns.
constexpr int kBlockColumns = 64;
constexpr int kBlocks = kWideTile / kBlockColumns;
constexpr int kBlockBytes = 64 * kBlockRowBytes;
constexpr int kTileBytes = kBlocks * kBlockBytes;
constexpr int kOwnBlocks = kHalf / kBlockColumns;  // that a consumer has values of
// The columns behind V's, which are no value's: after the scores the probabilities lie there.
constexpr int kRestBlock = kWideValues / kBlockColumns;
static_assert(kBlocks == kRestBlock + 1 && kBlockM == 64 && kBlockN == 64);

// Byte offsets into dynamic shared memory.
struct SmemMap {
  int stages;   // behind Q
  int full;     // mbarriers [kStages][kBlocks]: the block's columns are there
  int empty;    // mbarriers [kStages][kConsumers]: the consumer's columns may be overwritten
  int join;     // mbarriers: the other block of the cluster takes, and has brought its part
  int row_max;  // [kConsumers][kBlockM] floats
  int row_sum;  // the same
  int total;
};

constexpr SmemMap smem_map() {
  SmemMap map{};
  map.stages = kTileBytes;
  map.full = map.stages + kStages * kTileBytes;
  map.empty = map.full + kStages * kBlocks * 8;
  map.join = map.empty + kStages * kConsumers * 8;
  map.row_max = map.join + 2 * 8;
  map.row_sum = map.row_max + kConsumers * kBlockM * 4;
  map.total = map.row_sum + kConsumers * kBlockM * 4;
  return map;
}

// Tile shapes, by the rows that a block may have: with 64 it has any 64 of a KV head, narrow ones
// have all rows that there are.
enum Variant { kRows16, kRows32, kRows64 };
constexpr int kNumVariants = 3;
constexpr const char* kVariantNames[kNumVariants] = {"rows16", "rows32", "rows64"};
constexpr int rows_of(int variant) {
  return 16 << variant;
}

// The same of a narrow shape, whose keys come to a ring of blocks of columns.
constexpr int kNarrowWarps = kWarpgroupThreads / 32;  // of a consumer
// Keys of 8 bits come faster than one consumer takes them: where registers are enough for two,
// these have a tile each by turns.
constexpr int narrow_consumers(int rows, int key_bytes) {
  return rows == 16 && key_bytes == 1 ? 2 : 1;
}
constexpr int narrow_threads(int rows, int key_bytes) {
  return (1 + narrow_consumers(rows, key_bytes)) * kWarpgroupThreads;
}
// Warps that copy keys of 8 bits, which have as many blocks of a tile each.
constexpr int kByteCopyWarps = 3;
constexpr int kOutBlocks = kRestBlock;  // of columns that are values
struct NarrowMap {
  int slots, num_slots;  // behind Q
  int block_bytes;       // of a slot
  int probabilities;     // of one tile of each consumer, row by row
  int full, empty;       // mbarriers of each slot
  int join;              // as SmemMap's
  int of_rows;           // floats [2][kNarrowWarps][rows] of each consumer
  int factors;           // floats [rows], with keys of 8 bits: what a row's products count
  int total;
};

constexpr NarrowMap narrow_map(int rows, int key_bytes = kElementBytes) {
  constexpr int kMostBytes = 227 * 1024, kBarrierBytes = 8;  // of a block
  NarrowMap map{};
  map.slots = kBlocks * rows * kBlockRowBytes;
  map.block_bytes = kBlockBytes / kElementBytes * key_bytes;
  const int consumers = narrow_consumers(rows, key_bytes);
  const int probability_bytes = consumers * rows * kBlockRowBytes;
  const int of_rows_bytes = consumers * 2 * kNarrowWarps * rows * 4;
  const int factor_bytes = key_bytes == 1 ? rows * 4 : 0;
  const int beside =
      map.slots + probability_bytes + of_rows_bytes + factor_bytes + 2 * kBarrierBytes;
  map.num_slots = (kMostBytes - beside) / (map.block_bytes + 2 * kBarrierBytes);
  map.probabilities = map.slots + map.num_slots * map.block_bytes;
  map.full = map.probabilities + probability_bytes;
  map.empty = map.full + map.num_slots * kBarrierBytes;
  map.join = map.empty + map.num_slots * kBarrierBytes;
  map.of_rows = map.join + 2 * kBarrierBytes;
  map.factors = map.of_rows + of_rows_bytes;
  map.total = map.factors + factor_bytes;
  return map;
}

// The thread blocks of the combine kernel: `slices` for each row block. An SM holds so many, with
// registers for either way to add up.
constexpr int kResidentCombineBlocks = 6;
struct CombineGrid {
  std::int64_t row_blocks;
  int slices;
};

// Work is divided into row blocks of kBlockM with each.
constexpr TileConfig tile_config(int, int variant, int key_bytes = kElementBytes) {
  if (variant == kRows64) return {kBlockM, kBlockN, kNumThreads / 32, kStages, smem_map().total};
  const NarrowMap map = narrow_map(rows_of(variant), key_bytes);
  return {kBlockM, kBlockN, narrow_threads(rows_of(variant), key_bytes) / 32,
          map.num_slots / kBlocks, map.total};
}

}  // namespace dlattn::sm90_latent
