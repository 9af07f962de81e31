#pragma once

#include "cuda/plan/tile_config.h"

namespace dlattn::wmma {

constexpr int kElementBytes = 2;  // of q, k, v and out: float16 or bfloat16

// The tile shape of the kernel that divides the keys among the warps of a thread block: groups of
// warps, each with tiles of keys of its own, and in each group a warp per 16 query rows of the
// block.
struct SplitShape {
  int row_groups;     // warps of a group
  int key_groups;     // groups
  int block_n;        // keys per tile
  int stages;         // of a group in shared memory, a tile of V and a tile of K each
  int blocks_per_sm;  // that registers must leave room for
  bool single_pass;   // all keys fit in the stages, and their copies start at once
};

constexpr SplitShape split_shape(int head_dim_tile, bool single_pass) {
  if (single_pass) return {2, 4, 64, 2, 1, true};
  if (head_dim_tile <= 64) return {2, 4, 32, 2, 2, false};
  return {2, 4, 16, 2, 1, false};
}

// The most keys that a shape takes in a single pass.
constexpr int single_pass_keys(const SplitShape& shape) {
  return shape.key_groups * shape.stages * shape.block_n;
}

constexpr int num_warps(const SplitShape& shape) {
  return shape.row_groups * shape.key_groups;
}
constexpr int block_m(const SplitShape& shape) {
  return shape.row_groups * 16;
}

// Byte offsets into dynamic shared memory.
struct SplitSmemMap {
  int q;       // [block_m] rows as in tile::SwizzledRows
  int stages;  // [key_groups][stages] of V and K, [block_n] rows each; at the end a group's hold
               // its part of out
  int tile;    // bytes of a tile of K or V
  int group;   // bytes of a group's stages
  int stats;   // [block_m][key_groups] PartStats
  int total;
};

constexpr SplitSmemMap split_smem_map(int head_dim_tile, bool single_pass) {
  const SplitShape shape = split_shape(head_dim_tile, single_pass);
  SplitSmemMap map{};
  map.q = 0;
  map.stages = block_m(shape) * head_dim_tile * kElementBytes;
  map.tile = shape.block_n * head_dim_tile * kElementBytes;
  map.group = shape.stages * 2 * map.tile;
  map.stats = map.stages + shape.key_groups * map.group;
  map.total = map.stats + shape.key_groups * block_m(shape) * 8;
  return map;
}

constexpr TileConfig split_tile_config(int head_dim_tile, bool single_pass) {
  const SplitShape shape = split_shape(head_dim_tile, single_pass);
  return {block_m(shape), shape.block_n, num_warps(shape), shape.stages,
          split_smem_map(head_dim_tile, single_pass).total};
}

}  // namespace dlattn::wmma
