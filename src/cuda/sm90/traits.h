#pragma once

#include "cuda/tile/config.h"

namespace dlattn::sm90 {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;   // of queries, per consumer
constexpr int kBlockColumns = 64;    // tiles lie in shared memory in blocks of 64 columns,
constexpr int kBlockRowBytes = 128;  // whose rows are as long as the widest swizzle
constexpr int kItemBytes = 32;

struct TileShape {
  int num_consumers;  // warpgroups beside the producer's
  int block_n;        // keys per tile
  int num_stages;     // tiles of K, and as many of V, in shared memory; a power of two
  int query_stages;   // tiles of Q; with two, the next one's copy runs under this one's products
  bool takes_turns;   // consumers start their products one after the other
  // Per thread; together no more than the block has at launch (DESIGN.md).
  int producer_registers, consumer_registers;
};

constexpr TileShape tile_shape(int head_dim_tile) {
  if (head_dim_tile <= 64) return {4, 64, 4, 2, true, 24, 112};
  if (head_dim_tile <= 128) return {2, 128, 2, 2, true, 24, 240};
  return {2, 64, 2, 1, false, 24, 240};
}

constexpr int block_m(const TileShape& shape) {
  return shape.num_consumers * kWarpgroupRows;
}
constexpr int num_threads(const TileShape& shape) {
  return (shape.num_consumers + 1) * kWarpgroupThreads;
}

// Byte offsets into dynamic shared memory. Tiles are [head_dim_tile / 64] blocks of [rows][64]
// elements, swizzled.
struct SmemMap {
  int q;  // [query_stages][num_consumers] tiles of 64 rows, later those of out
  int k;  // [num_stages] tiles of block_n rows
  int v;  // the same
  int mbarriers;
  int items;  // [query_stages] of kItemBytes: which rows Q's are, where the lengths tell
  int total;
};

constexpr SmemMap smem_map(int head_dim_tile) {
  const TileShape shape = tile_shape(head_dim_tile);
  SmemMap map{};
  map.q = 0;
  map.k = map.q + shape.query_stages * block_m(shape) * head_dim_tile * 2;
  map.v = map.k + shape.num_stages * shape.block_n * head_dim_tile * 2;
  map.mbarriers = map.v + shape.num_stages * shape.block_n * head_dim_tile * 2;
  map.items = map.mbarriers + (2 * shape.query_stages + 4 * shape.num_stages) * 8;
  map.total = map.items + shape.query_stages * kItemBytes;
  return map;
}

constexpr TileConfig tile_config(int head_dim_tile) {
  const TileShape shape = tile_shape(head_dim_tile);
  return {block_m(shape), shape.block_n, num_threads(shape) / 32, shape.num_stages,
          smem_map(head_dim_tile).total};
}

}  // namespace dlattn::sm90
