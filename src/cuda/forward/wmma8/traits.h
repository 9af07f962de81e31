#pragma once

#include <cstdint>

#include "cuda/plan/tile_config.h"
#include "dlattn/forward.h"

namespace dlattn::wmma8 {

constexpr int kMbarrierBytes = 8;
// mma of e4m3, or of 8-bit integers alone, as a compute capability times ten.
constexpr int kMinCapability = 89, kMinCapabilityOfIntegers = 80;

// Each tile's sums are added to the output by fp32, which rounds each time: of so many keys it
// loses 2^-11 at most.
constexpr std::int64_t kMostKeys = 1 << 20;

struct TileShape {
  int num_warps;
  int row_tiles;            // per warp, of 16 query rows
  int block_n;              // keys per tile
  int stages;               // tiles of K and V in shared memory
  bool query_in_registers;  // else in shared memory of its own
};

constexpr TileShape tile_shape(int head_dim_tile) {
  TileShape shape{};
  shape.num_warps = 4;
  shape.row_tiles = 1;
  shape.block_n = head_dim_tile <= 128 ? 64 : 32;
  shape.stages = 2;
  shape.query_in_registers = head_dim_tile <= 128;
  return shape;
}

// For which registers must leave room; with V in fp16 it is shared memory that limits them.
constexpr int blocks_per_sm(int head_dim_tile, bool general, int value_bytes = 1) {
  if (value_bytes == 2) return head_dim_tile <= 64 ? 3 : head_dim_tile <= 128 ? 2 : 1;
  if (head_dim_tile > 128) return 2;
  return (head_dim_tile <= 64 ? 4 : 3) - (general ? 1 : 0);
}

constexpr int block_m(const TileShape& shape) {
  return shape.num_warps * shape.row_tiles * 16;
}

// Whether a problem needs the general kernel: bias or mask; of e4m3 softcap, or rows aligned to
// less than 16 bytes.
inline bool is_general(const AttentionParams& p, int copy_bytes) {
  const bool integers = p.precision != Precision::kInputs;
  return p.bias.data || p.mask.data || (!integers && (p.softcap != 0.0 || copy_bytes < 16));
}

// Whether there is a general kernel: with V in fp16 there are not registers enough for the largest
// tile.
constexpr bool has_general(int head_dim_tile, int value_bytes) {
  return head_dim_tile <= 128 || value_bytes == 1;
}
// Whether the general kernel of e4m3 has softcap and serves rows that are aligned to less than 16
// bytes: for larger tiles there are not registers enough.
constexpr bool has_softcap(int head_dim_tile) {
  return head_dim_tile <= 128;
}

// Byte offsets into dynamic shared memory.
struct SmemMap {
  int stage_bytes;  // of K, and then V; rows of head_dim_tile numbers, swizzled
  int v;            // within a stage
  int q;            // where it is kept in registers, in the last stage, before that has a tile
  int mbarriers;    // a full and an empty one per stage
  int total;
};

constexpr SmemMap smem_map(int head_dim_tile, int value_bytes = 1) {
  const TileShape shape = tile_shape(head_dim_tile);
  SmemMap map{};
  map.v = shape.block_n * head_dim_tile;
  map.stage_bytes = (1 + value_bytes) * map.v;
  const int stages_end = shape.stages * map.stage_bytes;
  map.q = shape.query_in_registers ? stages_end - map.stage_bytes : stages_end;
  map.mbarriers = stages_end + (shape.query_in_registers ? 0 : block_m(shape) * head_dim_tile);
  map.total = map.mbarriers + 2 * shape.stages * kMbarrierBytes;
  return map;
}

constexpr TileConfig tile_config(int head_dim_tile, int value_bytes = 1) {
  const TileShape shape = tile_shape(head_dim_tile);
  return {block_m(shape), shape.block_n, shape.num_warps, shape.stages,
          smem_map(head_dim_tile, value_bytes).total};
}

}  // namespace dlattn::wmma8
