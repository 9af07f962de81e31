#pragma once

#include "cuda/plan/bias_grid.h"

// The tiles of the backward kernels of mma.sync, as plain constexpr host code.
namespace dlattn::backward_wmma {

// The launches of a plan, as variants of the family.
enum Kernel : int { kKeys, kQueries, kConvert, kBias };
constexpr const char* kKernelNames[] = {"keys", "queries", "convert", kBiasName};

constexpr int kNumWarps = 8;
constexpr int kNumThreads = kNumWarps * 32;
constexpr int kElementBytes = 2;

// The kernel that walks queries for a block of keys (keys.cuh).
struct KeyTile {
  int block_n;  // keys per block
  int block_m;  // queries per step
};

constexpr KeyTile key_tile(int head_dim_tile) {
  if (head_dim_tile <= 64) return {128, 64};
  if (head_dim_tile <= 128) return {128, 32};
  return {64, 32};
}

// How many warps share 16 keys: two where one has too few registers for the accumulators of both
// gradients. Each then has half of the queries of a step, and half of the gradients' columns.
constexpr int key_sharers(int head_dim_tile) {
  return head_dim_tile <= 128 ? 1 : 2;
}
constexpr int key_groups(int head_dim_tile) {
  return kNumWarps / key_sharers(head_dim_tile);
}

// The last columns of V that a warp has no registers for.
constexpr int v_rest_columns(int head_dim_tile) {
  return head_dim_tile <= 128 ? 0 : 64;
}

// Byte offsets into dynamic shared memory. Rows of K, V, Q and dO are tile::SwizzledRows. V goes to
// registers first, so that it shares its place with others.
struct KeySmem {
  int k, v;        // [block_n] rows
  int q, dout;     // [block_m] rows
  int q_stage;     // from a stage of Q to the next, in bytes, and so on
  int dout_stage;  // 0: there is one stage
  int ds;          // [block_n] keys by [block_m] queries, in 16 bits
  int ds_stage;
  int p;           // as ds, of warps that share keys
  int v_rest;      // [block_n] rows of the columns of V that do not go to registers
  int lse, delta;  // [2][block_m] floats
  int total;
};

constexpr KeySmem key_smem(int head_dim_tile) {
  const KeyTile tile = key_tile(head_dim_tile);
  const int row = head_dim_tile * kElementBytes;
  const int keys = tile.block_n * row, queries = tile.block_m * row;
  const int scores = tile.block_n * tile.block_m * kElementBytes;
  KeySmem map{};
  map.q = map.k + keys;
  map.dout = map.q + queries;
  map.q_stage = 2 * queries;
  if (key_sharers(head_dim_tile) == 1) {  // Q, dO, V or the second stages of all
    map.dout_stage = 2 * queries;
    map.v = map.q + map.q_stage;
    map.ds = map.v + 2 * queries;
    map.ds_stage = scores;
    map.lse = map.ds + 2 * scores;
  } else {  // Q, V or dO and the second stage of Q
    map.v = map.dout;
    map.p = map.q + 3 * queries;
    map.ds = map.p + scores;
    map.v_rest = map.ds + scores;
    map.lse = map.v_rest + tile.block_n * v_rest_columns(head_dim_tile) * kElementBytes;
  }
  map.delta = map.lse + 2 * tile.block_m * 4;
  map.total = map.delta + 2 * tile.block_m * 4;
  return map;
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
  return kernel == kKeys ? key_smem(head_dim_tile).total : query_smem(head_dim_tile).total;
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
constexpr bool has_room_for_v(int head_dim_tile) {
  const KeySmem map = key_smem(head_dim_tile);
  return map.v + key_tile(head_dim_tile).block_n * head_dim_tile * kElementBytes <= map.lse;
}
static_assert(has_room_for_v(64) && has_room_for_v(128) && has_room_for_v(256));

}  // namespace dlattn::backward_wmma
