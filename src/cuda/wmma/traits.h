#pragma once

#include "cuda/tile/config.h"

namespace dlattn::wmma {

// Where a warp reads its rows of Q: from shared memory for every tile, or from registers, loaded
// once; then K and V may be laid over Q's shared memory.
enum class QueryPlace { kSmem, kRegisters, kRegistersOverlaid };

// Two tile shapes per head_dim tile, between which the plan chooses.
constexpr int kWide = 0;    // 32 rows per warp: every fragment of K and V feeds four products
constexpr int kNarrow = 1;  // 16 rows per warp: small blocks, for small grids and small SMs
constexpr int kGeneral = 2;  // all features, any alignment and head dim
constexpr int kNumVariants = 3;

struct TileShape {
  int row_tiles;    // per warp, of 16 query rows
  int block_n;      // keys per tile
  int slices;       // in which a tile's probabilities are made and multiplied with V
  int edge_slices;  // the same of edge tiles, which need more registers
  QueryPlace query_place;
  int blocks_per_sm;  // that registers must leave room for
};

constexpr int kNumWarps = 4;
constexpr int kNumStages = 2;

constexpr TileShape tile_shape(int head_dim_tile, int variant) {
  if (variant == kGeneral) {
    return head_dim_tile <= 64 ? TileShape{1, 64, 1, 1, QueryPlace::kRegistersOverlaid, 3}
                               : TileShape{1, 32, 1, 1, QueryPlace::kRegistersOverlaid, 3};
  }
  if (variant == kWide) {
    return head_dim_tile <= 64 ? TileShape{2, 64, 1, 1, QueryPlace::kRegisters, 2}
                               : TileShape{2, 64, 1, 4, QueryPlace::kSmem, 2};
  }
  return head_dim_tile <= 64 ? TileShape{1, 64, 2, 1, QueryPlace::kRegistersOverlaid, 3}
                             : TileShape{1, 32, 2, 2, QueryPlace::kRegistersOverlaid, 3};
}

constexpr int block_m(const TileShape& shape) {
  return kNumWarps * shape.row_tiles * 16;
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
  return {block_m(shape), shape.block_n, kNumWarps, kNumStages,
          smem_map(head_dim_tile, variant).total};
}

}  // namespace dlattn::wmma
