#pragma once

#include <cstdint>

#include "cuda/plan/bias_grid.h"

// The tiles of the backward kernels of mma.sync, as plain constexpr host code.
namespace dlattn::backward_wmma {

// The launches of a plan, as variants of the family.
enum Kernel : int { kKeys, kQueries, kConvert, kBias, kLarge };
constexpr const char* kKernelNames[] = {"keys", "queries", "convert", kBiasName, "large"};

constexpr int kNumWarps = 8;
constexpr int kNumThreads = kNumWarps * 32;
constexpr int kElementBytes = 2;
constexpr int kMbarrierBytes = 8;
constexpr int kKeyMbarriers = 6;  // at most

// The kernel that walks queries for a block of keys (keys.cuh). Of head dims above 64 there are
// two: one that runs in 99 KB of shared memory, and a large one for GPUs that have twice as much.
struct KeyTile {
  int block_n;  // keys per block
  int block_m;  // queries per step
  int num_warps;
  int row_tiles;  // of 16 keys that a warp has
  // How many warps share them: each then has a part of a step's queries, and of the columns of the
  // gradients, whose accumulators one warp has too few registers for.
  int sharers;
  int stages;    // of Q and dO
  int ds_steps;  // of which dS is in shared memory side by side, for dQ of all of them at once
  int blocks_per_sm;

  constexpr int groups() const { return num_warps / sharers; }
};

constexpr KeyTile key_tile(int head_dim_tile, bool large = false) {
  if (head_dim_tile <= 64) return {128, 32, 4, 2, 1, 2, 2, 2};
  if (head_dim_tile <= 128)
    return large ? KeyTile{128, 64, 8, 2, 2, 3, 1, 1} : KeyTile{128, 32, 8, 1, 1, 2, 2, 1};
  return large ? KeyTile{64, 64, 8, 2, 4, 2, 1, 1} : KeyTile{64, 32, 8, 1, 2, 2, 1, 1};
}

// The last columns of V that a warp of the small kernel has no registers for.
constexpr int v_rest_columns(int head_dim_tile) {
  return head_dim_tile <= 128 ? 0 : 64;
}

// Byte offsets into dynamic shared memory. Rows of K, V, Q and dO are tile::SwizzledRows. But for
// the large kernel V goes to registers first, so that it shares its place with others.
struct KeySmem {
  int k, v;          // [block_n] rows
  int q, dout;       // [block_m] rows
  int q_stage;       // from a stage of Q to the next, in bytes, and so on
  int dout_stage;    // 0: there is one stage
  int ds;            // [block_n] keys by [ds_steps * block_m] queries, in 16 bits
  int p;             // as ds, of warps that share keys
  int scores_stage;  // of both
  int v_rest;        // [block_n] rows of the columns of V that do not go to registers
  int lse, delta;    // [stages][block_m] floats
  int mbarriers;     // of the small kernel
  int total;
};

constexpr KeySmem key_smem(int head_dim_tile, bool large = false) {
  const KeyTile tile = key_tile(head_dim_tile, large);
  const int row = head_dim_tile * kElementBytes;
  const int keys = tile.block_n * row, queries = tile.block_m * row;
  const int scores = tile.block_n * tile.ds_steps * tile.block_m * kElementBytes;
  KeySmem map{};
  if (large) {
    map.v = keys;
    map.q = 2 * keys;
    map.dout = map.q + queries;
    map.q_stage = map.dout_stage = 2 * queries;
    map.p = map.q + tile.stages * map.q_stage;
    map.ds = map.p + scores;
    map.scores_stage = tile.stages == 3 ? 2 * scores : 0;
    map.lse = map.ds + scores + map.scores_stage;
  } else if (tile.sharers == 1) {  // Q, dO, V or their second stages and dS
    map.q = keys;
    map.dout = map.q + queries;
    map.q_stage = map.dout_stage = 2 * queries;
    map.v = map.q + map.q_stage;
    map.ds = map.v + 2 * queries;
    map.lse = map.ds + scores;
  } else {  // Q, V or dO and the second stage of Q
    map.q = keys;
    map.dout = map.q + queries;
    map.q_stage = 2 * queries;
    map.v = map.dout;
    map.p = map.q + 3 * queries;
    map.ds = map.p + scores;
    map.v_rest = map.ds + scores;
    map.lse = map.v_rest + tile.block_n * v_rest_columns(head_dim_tile) * kElementBytes;
  }
  map.delta = map.lse + tile.stages * tile.block_m * 4;
  map.mbarriers = map.delta + tile.stages * tile.block_m * 4;
  map.total = map.mbarriers + (large ? 0 : kKeyMbarriers * kMbarrierBytes);
  return map;
}

// Whether a GPU takes the large kernel.
constexpr bool is_large(int head_dim_tile, std::int64_t smem_per_block) {
  return head_dim_tile > 64 && key_smem(head_dim_tile, true).total <= smem_per_block;
}

// The kernel that walks keys for a block of queries (queries.cuh). `key_splits` warps share 16
// queries and divide a tile's keys.
struct QueryTile {
  int block_m;  // queries per block
  int block_n;  // keys per step
  int key_splits;
};

constexpr QueryTile query_tile(int head_dim_tile) {
  if (head_dim_tile <= 128) return {128, 64, 1};
  return {64, 32, 2};
}

struct QuerySmem {
  int q, dout;  // [block_m] rows; at the end the parts of dQ of the warps that share rows
  int k, v;     // [block_n] rows
  int total;
};

constexpr QuerySmem query_smem(int head_dim_tile) {
  const QueryTile tile = query_tile(head_dim_tile);
  const int row = head_dim_tile * kElementBytes;
  QuerySmem map{};
  map.dout = map.q + tile.block_m * row;
  map.k = map.dout + tile.block_m * row;
  map.v = map.k + tile.block_n * row;
  map.total = map.v + tile.block_n * row;
  return map;
}

// dQ while it is added up, in fp32: parts of 16 queries by 32 columns, each as a warp has it in
// accumulators, 16 numbers a lane, lane after lane (queries of a sequence begin with a part).
constexpr int kPartRows = 16;
constexpr int kPartColumns = 32;
constexpr int kPartSize = kPartRows * kPartColumns;

// Dynamic shared memory of a launch.
constexpr int smem_bytes(int head_dim_tile, int kernel) {
  if (kernel == kConvert) return 0;
  if (kernel == kKeys || kernel == kLarge) return key_smem(head_dim_tile, kernel == kLarge).total;
  return query_smem(head_dim_tile).total;
}

constexpr int num_threads(int head_dim_tile, int kernel) {
  return kernel == kKeys ? 32 * key_tile(head_dim_tile).num_warps : kNumThreads;
}

// Other families launch the kernel of dbias by what cuda/plan/bias_grid.h has of it.
constexpr bool is_bias_launch(int head_dim_tile) {
  const QueryTile own = query_tile(head_dim_tile);
  const BiasTile known = bias_tile(head_dim_tile);
  return own.block_m == known.block_m && own.block_n == known.block_n &&
         query_smem(head_dim_tile).total == bias_smem_bytes(head_dim_tile);
}
static_assert(kBias == kBiasVariant && kNumWarps == kBiasWarps && is_bias_launch(64) &&
              is_bias_launch(128) && is_bias_launch(256));

constexpr int kMostSmem = 99 * 1024;
static_assert(key_smem(64).total <= kMostSmem && query_smem(64).total <= kMostSmem);
static_assert(key_smem(128).total <= kMostSmem && query_smem(128).total <= kMostSmem);
static_assert(key_smem(256).total <= kMostSmem && query_smem(256).total <= kMostSmem);
static_assert(2 * (key_smem(64).total + 1024) <= 100 * 1024, "two blocks an SM");
constexpr int kMostLargeSmem = 227 * 1024;
static_assert(key_smem(128, true).total <= kMostLargeSmem);
static_assert(key_smem(256, true).total <= kMostLargeSmem);
constexpr bool has_room_for_v(int head_dim_tile) {
  const KeySmem map = key_smem(head_dim_tile);
  return map.v + key_tile(head_dim_tile).block_n * head_dim_tile * kElementBytes <= map.lse;
}
static_assert(has_room_for_v(64) && has_room_for_v(128) && has_room_for_v(256));
// Grids and what they leave in the workspace are alike.
static_assert(key_tile(128).block_n == key_tile(128, true).block_n &&
              key_tile(256).block_n == key_tile(256, true).block_n);

}  // namespace dlattn::backward_wmma
