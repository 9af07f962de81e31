#pragma once

#include <cstdint>

#include "cuda/plan/tile_config.h"
#include "cuda/tile/key_parts/workspace.h"

// Tile shapes of the kernels for few queries over many keys.
namespace dlattn::decode {

using namespace tile::key_parts;  // how the keys are partitioned, and parts added up

constexpr int kElementBytes = 2;     // of q and out, and of what is multiplied: float16 or bfloat16
constexpr int kKeyBytes[] = {2, 1};  // that elements of k and v may have: as q, int8 or e4m3

// Query rows of a KV head that a thread block computes.
enum Variant { kRows16, kRows32 };
constexpr int kNumVariants = 2;
constexpr const char* kVariantNames[kNumVariants] = {"rows16", "rows32"};

// Wide heads have kernels of their own (wide_kernel.cuh).
constexpr bool has_variant(int head_dim_tile, int variant) {
  // Registers are scarce at 256.
  return variant == kRows16 || head_dim_tile <= 128 || is_wide(head_dim_tile);
}

// A block's warps form key_groups groups of row_groups x column_warps warps: a group has keys of
// its own, in each tile `slice` of them, and each column_warps warps of it have 16 of the rows.
struct Shape {
  int row_groups;
  int key_groups;
  int slice;
  int stages;            // of a group, a slice of K and V each
  bool queries_in_smem;  // or in registers, where there is room
  int key_bytes;         // of an element of K and V
  int column_warps = 1;  // with wide heads a warp has some of the columns
};

// With 8-bit keys slices are of more keys, or stages are more, for as many bytes to be on their
// way, and but for wide heads queries are in shared memory, in the order that their products want
// (byte_queries.cuh).
constexpr Shape shape_of(int head_dim_tile, int variant, int key_bytes) {
  const int row_groups = variant == kRows16 ? 1 : 2;
  if (is_wide(head_dim_tile))
    return {row_groups, 1, key_bytes == 1 ? 32 : 16, 4, false, key_bytes, 4};
  if (key_bytes == 1) {
    if (head_dim_tile <= 64) return {row_groups, 4, 32, 5, true, key_bytes};
    if (head_dim_tile <= 128) return {row_groups, 4, 32, 2, true, key_bytes};
    return {row_groups, 2, 16, 4, true, key_bytes};
  }
  if (head_dim_tile <= 64) return {row_groups, 4, 32, 3, false, key_bytes};
  if (head_dim_tile <= 128) return {row_groups, 4, 16, 3, false, key_bytes};
  return {row_groups, 2, 16, 2, true, key_bytes};
}
constexpr int num_warps(const Shape& shape) {
  return shape.row_groups * shape.key_groups * shape.column_warps;
}
constexpr int block_m(const Shape& shape) {
  return shape.row_groups * 16;
}
constexpr int block_n(const Shape& shape) {
  return shape.slice * shape.key_groups;
}

// Byte offsets into dynamic shared memory.
struct SmemMap {
  int tensor;  // bytes of a slice of K or V; a stage has both
  int group;   // bytes of a group's stages, which at the end of a row block hold its part of out
  int stats;   // [block_m][key_groups] PartStats
  int q;       // [block_m] rows of Q, if they are in shared memory
  int scales;  // [block_m] floats, what products of these rows count, with 8-bit keys
  int total;
};

constexpr SmemMap smem_map(int head_dim_tile, const Shape& shape) {
  SmemMap map{};
  map.tensor = shape.slice * head_dim_tile * shape.key_bytes;
  map.group = shape.stages * 2 * map.tensor;
  map.stats = shape.key_groups * map.group;
  map.q = map.stats + block_m(shape) * shape.key_groups * 8;
  map.scales = map.q + (shape.queries_in_smem ? block_m(shape) * head_dim_tile * kElementBytes : 0);
  map.total = map.scales + (shape.key_bytes == 1 ? block_m(shape) * 4 : 0);
  return map;
}

// The same of kernels for wide heads.
struct WideSmemMap {
  int tensor;  // bytes of a slice of K or V
  int parts;   // behind the stages: fp32 [num_warps][16][slice], the scores by a warp's columns
  int total;
};

constexpr WideSmemMap wide_smem_map(const Shape& shape) {
  WideSmemMap map{};
  map.tensor = shape.slice * kWideTile * shape.key_bytes;
  map.parts = shape.stages * map.tensor;
  map.total = map.parts + num_warps(shape) * 16 * shape.slice * 4;
  return map;
}

constexpr TileConfig tile_config(int head_dim_tile, int variant, int key_bytes) {
  const Shape shape = shape_of(head_dim_tile, variant, key_bytes);
  const int smem_bytes =
      is_wide(head_dim_tile) ? wide_smem_map(shape).total : smem_map(head_dim_tile, shape).total;
  return {block_m(shape), block_n(shape), num_warps(shape), shape.stages, smem_bytes};
}

}  // namespace dlattn::decode
