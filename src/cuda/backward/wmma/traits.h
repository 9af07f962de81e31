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

// The kernel that walks queries for a block of keys (keys.cuh). Pairs of warps share `pair_keys`
// keys.
struct KeyTile {
  int block_n;  // keys per block
  int block_m;  // queries per step
};
constexpr int kPairs = kNumWarps / 2;

constexpr KeyTile key_tile(int head_dim_tile) {
  if (head_dim_tile <= 64) return {128, 64};
  if (head_dim_tile <= 128) return {128, 32};
  return {64, 16};
}
constexpr int pair_keys(int head_dim_tile) {
  return key_tile(head_dim_tile).block_n / kPairs;
}

// Byte offsets into dynamic shared memory. Rows of K, V, Q and dO are tile::SwizzledRows.
struct KeySmem {
  int k, v;   // [block_n] rows
  int q;      // [2][block_m] rows
  int dout;   // [block_m] rows
  int ds;     // [block_n] keys by [block_m] queries, in 16 bits
  int p;      // half of P in fp32, over ds where two keys do not share a row of it
  int lse;    // [2][block_m] floats
  int delta;  // [block_m] floats
  int total;
};

constexpr KeySmem key_smem(int head_dim_tile) {
  const KeyTile tile = key_tile(head_dim_tile);
  const int row = head_dim_tile * kElementBytes;
  KeySmem map{};
  map.v = map.k + tile.block_n * row;
  map.q = map.v + tile.block_n * row;
  map.dout = map.q + 2 * tile.block_m * row;
  map.ds = map.dout + tile.block_m * row;
  const int scores = tile.block_n * tile.block_m * kElementBytes;
  map.p = tile.block_m < 32 ? map.ds + scores : map.ds;
  map.lse = map.p + scores;
  map.delta = map.lse + 2 * tile.block_m * 4;
  map.total = map.delta + tile.block_m * 4;
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

}  // namespace dlattn::backward_wmma
