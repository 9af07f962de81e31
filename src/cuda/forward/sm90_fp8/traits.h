#pragma once

#include <cstdint>

#include "cuda/plan/tile_config.h"
#include "cuda/tile/wgmma/warpgroup.h"
#include "dlattn/forward.h"

namespace dlattn::sm90_fp8 {

using tile::wgmma::kBlockRowBytes;
using tile::wgmma::kWarpgroupRows;
using tile::wgmma::kWarpgroupThreads;
using tile::wgmma::kWorkTileBytes;

constexpr int kBlockColumns = 128;  // tiles lie in shared memory in blocks of as many columns
constexpr int kTransposers = 3;  // warps of the producer's that transpose V; the other one copies

// Each tile's sums are added to the output by fp32, which rounds each time: of so many keys it
// loses 2^-11 at most.
constexpr std::int64_t kMostKeys = 1 << 20;

struct TileShape {
  int num_consumers = 2;      // warpgroups beside the producer's
  int block_n = 128;          // keys per tile
  int query_stages = 2;       // tiles of Q in shared memory; each of these a power of two
  int key_stages = 4;         // of K
  int value_stages = 2;       // of V as it lies in memory
  int transposed_stages = 4;  // and of V transposed
  // Per thread; together no more than the block has at launch.
  int producer_registers = 24, consumer_registers = 240;
  // Whether a consumer starts a tile's scores before the product with V of the tile before it, so
  // that its softmax runs under that; otherwise under the other consumer's products alone.
  bool pipelined = true;
};

constexpr TileShape tile_shape(int head_dim_tile) {
  TileShape shape;
  if (head_dim_tile <= 64) {
    shape.num_consumers = 3;
    shape.block_n = 96;
    shape.producer_registers = 32;
    shape.consumer_registers = 160;
  }
  if (head_dim_tile > 128) {
    shape.query_stages = 1;
    shape.key_stages = shape.transposed_stages = 2;
    shape.pipelined = false;
  }
  return shape;
}

// Persistent blocks take causal work tiles by twos (WorkTiles) up to so many for each. With more,
// shares are about equal in any order.
constexpr int kMostByTwos = 4;

constexpr int block_m(const TileShape& shape) {
  return shape.num_consumers * kWarpgroupRows;
}
constexpr int num_threads(const TileShape& shape) {
  return (shape.num_consumers + 1) * kWarpgroupThreads;
}

// Whether a problem has the caller's bias or mask, for which there is a kernel of its own.
inline bool has_given_scores(const AttentionParams& p) {
  return p.bias.data || p.mask.data;
}

// Bytes of `rows` rows in shared memory: blocks of [rows][128] elements, swizzled, the last of
// which may be wider than its columns.
constexpr int tile_bytes(int rows, int columns) {
  return (columns + kBlockColumns - 1) / kBlockColumns * rows * kBlockRowBytes;
}

// Byte offsets into dynamic shared memory.
struct SmemMap {
  int q;           // [query_stages][num_consumers] tiles of 64 rows
  int k;           // [key_stages] tiles of block_n rows
  int v;           // [value_stages] of those of V
  int transposed;  // [transposed_stages] tiles of head_dim rows of block_n keys
  int mbarriers;
  int work_tiles;  // [query_stages] of kWorkTileBytes: which rows Q's are; used with varlen
  int total;
};

constexpr SmemMap smem_map(int head_dim_tile) {
  const TileShape shape = tile_shape(head_dim_tile);
  SmemMap map{};
  map.k = map.q + shape.query_stages * tile_bytes(block_m(shape), head_dim_tile);
  map.v = map.k + shape.key_stages * tile_bytes(shape.block_n, head_dim_tile);
  map.transposed = map.v + shape.value_stages * tile_bytes(shape.block_n, head_dim_tile);
  map.mbarriers =
      map.transposed + shape.transposed_stages * tile_bytes(head_dim_tile, shape.block_n);
  const int stages =
      shape.query_stages + shape.key_stages + shape.value_stages + shape.transposed_stages;
  map.work_tiles = map.mbarriers + 2 * stages * 8;
  map.total = map.work_tiles + shape.query_stages * kWorkTileBytes;
  return map;
}

constexpr TileConfig tile_config(int head_dim_tile) {
  const TileShape shape = tile_shape(head_dim_tile);
  return {block_m(shape), shape.block_n, num_threads(shape) / 32, shape.key_stages,
          smem_map(head_dim_tile).total};
}

}  // namespace dlattn::sm90_fp8
