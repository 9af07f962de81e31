#pragma once

#include "cuda/plan/tile_config.h"
#include "cuda/tile/wgmma/warpgroup.h"

// The tiles of the backward kernel of wgmma, as plain constexpr host code.
namespace dlattn::backward_sm90 {

using tile::wgmma::kBlockRowBytes;
using tile::wgmma::kWarpgroupRows;
using tile::wgmma::kWarpgroupThreads;

// The family's kernels, as variants of launches.
enum Kernel {
  kPlain,
  kSoftcap,
  kDeterministic,
  kDeterministicSoftcap,
  kScoreMod,  // ALiBi, bias and mask; in a fixed order or not
  kScoreModSoftcap,
  kPair,  // plain, of wide heads
  kLate,  // plain, of long walks (late_consumer.cuh)
  kConvert
};
constexpr const char* kKernelNames[] = {
    "plain", "softcap", "deterministic", "deterministic_softcap", "score_mod", "score_mod_softcap",
    "pair",  "late",    "convert"};

constexpr int kBlockColumns = 64;  // tiles lie in shared memory in blocks of as many columns

constexpr int kNumConsumers = 2;  // warpgroups beside the producer's
constexpr int kConsumerWarps = kNumConsumers * kWarpgroupThreads / 32;
constexpr int kNumThreads = (kNumConsumers + 1) * kWarpgroupThreads;
constexpr int kNumStages = 2;  // tiles of Q and dO, and tiles of dS
// Per thread; together no more than the block has at launch. Warps that bring bias and mask take
// more where consumers can do with less.
struct Registers {
  int producer, consumer;
};
constexpr Registers registers_of(int head_dim_tile, bool score_mod) {
  return score_mod && head_dim_tile <= 64 ? Registers{40, 232} : Registers{24, 240};
}

// Whether softcap goes with ALiBi, bias and mask. With 128 columns modified scores, beside tanh and
// dK and dV of all of them, have some 20 registers too few.
constexpr bool has_score_mod_softcap_kernel(int head_dim_tile) {
  return head_dim_tile != 128;
}

// Keys per thread block. Consumers have 64 each, or all of them and half of the columns of their
// gradients each: with 256 columns a consumer's registers hold no more.
constexpr bool is_wide(int head_dim_tile) {
  return head_dim_tile > 128;
}
constexpr int block_n(int head_dim_tile) {
  return is_wide(head_dim_tile) ? kWarpgroupRows : kNumConsumers * kWarpgroupRows;
}

// Queries per step. Softcap takes registers.
constexpr int block_m(int head_dim_tile, bool softcap) {
  return head_dim_tile <= 64 && !softcap ? 128 : 64;
}

// The sum of dQ lies in rows of 64 queries, each with its columns in the order of accumulators of
// 64 rows: so its order is the same whatever a step has of it.
//
// The consumers' parts of a step's dQ: of 64 rows each, or of half of the columns.
struct DqParts {
  int rows, columns;  // how many parts
};
constexpr DqParts dq_parts(int head_dim_tile, bool softcap) {
  const int rows = block_m(head_dim_tile, softcap) / kWarpgroupRows;
  return {rows, kNumConsumers / rows};
}
constexpr int part_columns(int head_dim_tile, bool softcap) {
  return head_dim_tile / dq_parts(head_dim_tile, softcap).columns;
}

// Bytes of `rows` rows in shared memory: blocks of [rows][64] elements of 16 bits, swizzled.
constexpr int tile_bytes(int rows, int columns) {
  return columns / kBlockColumns * rows * kBlockRowBytes;
}

// lse in base 2 and delta of a query.
constexpr int kRowStatsBytes = 8;

constexpr int kWorkBytes = 80;

constexpr int score_bytes(int head_dim_tile, bool softcap) {
  const int tile = tile_bytes(block_m(head_dim_tile, softcap), block_n(head_dim_tile));
  return is_wide(head_dim_tile) ? 2 * tile : tile;
}

// Bytes of barriers where a warp sends dQ, and of a claim behind them.
constexpr int kDqBarrierBytes = (2 * kNumConsumers + 2) * 8 + 4;

// Byte offsets into dynamic shared memory.
struct SmemMap {
  int k, v;       // tiles of block_n rows
  int q, dout;    // [kNumStages] tiles of block_m rows
  int ds;         // [kNumStages] tiles of dS, block_m by block_n; the wide ones' P before each
  int row_stats;  // [kNumStages][block_m] of kRowStatsBytes
  int mbarriers;
  int work;         // the block's keys
  int may_add;      // mbarriers of deterministic kernels
  int score_tiles;  // and of those with bias or mask
  int dq_barriers;  // and of those whose dQ a warp sends, kDqBarrierBytes (dq_sender.cuh)
  int dq;  // the consumers' parts of a step's dQ, in the order of registers; not of wide heads
  int total;
};

constexpr SmemMap smem_map(int head_dim_tile, bool softcap) {
  const int rows = block_m(head_dim_tile, softcap), keys = block_n(head_dim_tile);
  SmemMap map{};
  map.v = map.k + tile_bytes(keys, head_dim_tile);
  map.q = map.v + tile_bytes(keys, head_dim_tile);
  map.dout = map.q + kNumStages * tile_bytes(rows, head_dim_tile);
  map.ds = map.dout + kNumStages * tile_bytes(rows, head_dim_tile);
  map.row_stats = map.ds + kNumStages * score_bytes(head_dim_tile, softcap);
  map.mbarriers = map.row_stats + kNumStages * rows * kRowStatsBytes;
  map.work = map.mbarriers + (2 * kNumStages + 2) * 8;
  map.may_add = map.work + kWorkBytes;
  map.score_tiles = map.may_add + 3 * kNumStages * 8;
  map.dq_barriers = map.may_add;  // no kernel has them and those, or score_tiles
  map.total = map.score_tiles + (2 * 2 * kNumStages + 2) * 8;
  static_assert(kDqBarrierBytes <= (3 * kNumStages + 2 * 2 * kNumStages + 2) * 8, "");
  if (!is_wide(head_dim_tile)) {
    map.dq = (map.total + 127) / 128 * 128;
    map.total = map.dq + rows * head_dim_tile * 4;
  }
  return map;
}

// Behind it kernels with a mask have the next tile's bytes of it, as they are in memory. Those of
// wide heads have no room left: there they lie where P of the same tile will.
constexpr int mask_offset(int head_dim_tile, bool softcap) {
  return (smem_map(head_dim_tile, softcap).total + 127) / 128 * 128;
}
constexpr int smem_with_mask(int head_dim_tile, bool softcap) {
  if (is_wide(head_dim_tile)) return smem_map(head_dim_tile, softcap).total;
  return mask_offset(head_dim_tile, softcap) +
         block_m(head_dim_tile, softcap) * block_n(head_dim_tile);
}

// Pairs of thread blocks, clusters, that share 128 keys of wide heads (pair_kernel.cuh).
constexpr int kPairBlocks = 2;
constexpr int kPairKeys = kNumConsumers * kWarpgroupRows;
constexpr int kPairQueries = 64;  // of a step

// Byte offsets into the dynamic shared memory of either block of a pair. The first one has K and
// two tiles of Q, the second one V, half of K's columns and one tile of Q.
struct PairSmemMap {
  int keys;       // K or V
  int half_keys;  // the second block's
  int q;          // the first block's
  int second_q;   // the second block's
  int dout;       // [kNumStages], in both
  int scores;     // [kNumStages] tiles of dS; before it P in the second block
  int row_stats;  // [kNumStages][kPairQueries] of kRowStatsBytes
  int mbarriers;
  int work;
  int total;
};
constexpr int kPairMbarriers = 19;

constexpr PairSmemMap pair_smem_map(int head_dim_tile) {
  const int queries = tile_bytes(kPairQueries, head_dim_tile);
  PairSmemMap map{};
  map.half_keys = map.q = map.keys + tile_bytes(kPairKeys, head_dim_tile);
  map.second_q = map.half_keys + tile_bytes(kPairKeys, head_dim_tile) / kPairBlocks;
  map.dout = map.q + kNumStages * queries;
  map.scores = map.dout + kNumStages * queries;
  map.row_stats = map.scores + kNumStages * tile_bytes(kPairQueries, kPairKeys);
  map.mbarriers = map.row_stats + kNumStages * kPairQueries * kRowStatsBytes;
  map.work = map.mbarriers + kPairMbarriers * 8;
  map.work = (map.work + 15) / 16 * 16;
  map.total = map.work + kWorkBytes;
  return map;
}

// The most that a kernel of the family takes.
constexpr int kSmemBytes = smem_map(256, false).total;
constexpr int kMostSmem = 227 * 1024;
static_assert(pair_smem_map(256).total <= kSmemBytes && kSmemBytes <= kMostSmem &&
                  smem_with_mask(64, false) <= kMostSmem && smem_with_mask(128, false) <= kMostSmem,
              "");

}  // namespace dlattn::backward_sm90
