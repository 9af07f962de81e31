#pragma once

#include "cuda/tile/config.h"

namespace dlattn::wmma {

// Where a warp reads its rows of Q: from shared memory for every tile, or from registers, loaded
// once; then K and V may be laid over Q's shared memory.
enum class QueryPlace { kSmem, kRegisters, kRegistersOverlaid };

// Tile shapes per head_dim tile, between which the plan chooses.
constexpr int kWide = 0;    // as many rows as registers hold: each fragment of K and V feeds most
constexpr int kNarrow = 1;  // 16 rows per warp: small blocks, for small grids and small SMs
constexpr int kNumVariants = 2;
constexpr const char* kVariantNames[kNumVariants] = {"wide", "narrow"};

struct TileShape {
  int num_warps;
  int row_tiles;    // per warp, of 16 query rows
  int block_n;      // keys per tile
  int slices;       // in which a tile's probabilities are made and multiplied with V
  int edge_slices;  // the same of edge tiles, which need more registers
  QueryPlace query_place;
  int blocks_per_sm;  // that registers must leave room for
};

constexpr int kNumStages = 2;

constexpr TileShape wide_shape(int head_dim_tile) {
  if (head_dim_tile <= 64) return {4, 2, 64, 1, 1, QueryPlace::kRegisters, 2};
  if (head_dim_tile <= 128) return {4, 2, 64, 1, 4, QueryPlace::kSmem, 2};
  return {8, 1, 32, 2, 2, QueryPlace::kRegistersOverlaid, 1};
}

constexpr TileShape narrow_shape(int head_dim_tile) {
  if (head_dim_tile <= 64) return {4, 1, 64, 2, 1, QueryPlace::kRegistersOverlaid, 3};
  if (head_dim_tile <= 128) return {4, 1, 32, 2, 2, QueryPlace::kRegistersOverlaid, 3};
  return {4, 1, 32, 2, 2, QueryPlace::kRegistersOverlaid, 2};
}

constexpr TileShape tile_shape(int head_dim_tile, int variant) {
  return variant == kWide ? wide_shape(head_dim_tile) : narrow_shape(head_dim_tile);
}

// Whether there is a kernel of this shape.
constexpr bool has_variant(int, int variant) {
  return 0 <= variant && variant < kNumVariants;
}

constexpr int block_m(const TileShape& shape) {
  return shape.num_warps * shape.row_tiles * 16;
}

// Byte offsets into dynamic shared memory; rows as in tile::SwizzledRows.
struct SmemMap {
  int q;  // [block_m] rows, later those of out
  int k;  // [kNumStages][block_n] rows
  int v;  // [kNumStages][block_n] rows
  int total;
};

constexpr SmemMap smem_map(int head_dim_tile, int variant) {
  const TileShape shape = tile_shape(head_dim_tile, variant);
  const int q_bytes = block_m(shape) * head_dim_tile * 2;
  const int k_bytes = kNumStages * shape.block_n * head_dim_tile * 2;
  SmemMap map{};
  map.q = 0;
  map.k = shape.query_place == QueryPlace::kRegistersOverlaid ? 0 : q_bytes;
  map.v = map.k + k_bytes;
  map.total = map.v + k_bytes > q_bytes ? map.v + k_bytes : q_bytes;
  return map;
}

constexpr TileConfig tile_config(int head_dim_tile, int variant) {
  const TileShape shape = tile_shape(head_dim_tile, variant);
  return {block_m(shape), shape.block_n, shape.num_warps, kNumStages,
          smem_map(head_dim_tile, variant).total};
}

}  // namespace dlattn::wmma
