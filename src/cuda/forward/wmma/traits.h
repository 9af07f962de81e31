#pragma once

#include "cuda/forward/wmma/split_traits.h"
#include "cuda/tile/config.h"

namespace dlattn::wmma {

// Where a warp reads its rows of Q: from shared memory for every tile, or from registers, loaded
// once; then K and V may be laid over Q's shared memory.
enum class QueryPlace { kSmem, kRegisters, kRegistersOverlaid };

// How warps hand the stages of K and V over to each other (stages.cuh). kMbarrierIfSlow: by
// mbarriers where tensor cores are slow, else by the block's barrier, which is settled when the
// kernel is compiled. Where TMA fills them, from compute capability 9.0 on, it brings Q as well.
enum class Handover { kBlockBarrier, kMbarrier, kMbarrierIfSlow, kTma };

// Tile shapes per head_dim tile, between which the plan chooses.
constexpr int kWide = 0;    // as many rows as registers hold: each fragment of K and V feeds most
constexpr int kNarrow = 1;  // 16 rows per warp: small blocks, for small grids and small SMs
constexpr int kSplit = 2;   // keys divided among the warps (split.cuh): for smaller grids still
constexpr int kPipelined = 3;   // as wide, with software pipelining by mbarriers
constexpr int kGeneral = 4;     // score modification, bias, mask, odd head dims (general.cuh)
constexpr int kSinglePass = 5;  // split in a single pass over the keys: more shared memory
constexpr int kPersistent = 6;  // work tile after work tile in one block, over TMA (persistent.cuh)
constexpr int kNumVariants = 7;
constexpr const char* kVariantNames[kNumVariants] = {
    "wide", "narrow", "split", "pipelined", "general", "single_pass", "persistent"};

constexpr bool splits_keys(int variant) {
  return variant == kSplit || variant == kSinglePass;
}

struct TileShape {
  int num_warps;
  int row_tiles;  // per warp, of 16 query rows
  int block_n;    // keys per tile
  int slices;     // in which a tile's probabilities are made and multiplied with V
  int edge_keys;  // of an edge tile that are worked on at a time; fewer take fewer registers
  QueryPlace query_place;
  int blocks_per_sm;  // that registers must leave room for
  Handover handover = Handover::kBlockBarrier;
  int stages = 2;  // tiles of K and V in shared memory
};

constexpr TileShape wide_shape(int head_dim_tile, Handover handover) {
  if (head_dim_tile <= 64) return {4, 2, 64, 1, 32, QueryPlace::kRegisters, 2, handover};
  if (head_dim_tile <= 128) return {4, 2, 64, 4, 32, QueryPlace::kSmem, 2, handover};
  return {8, 1, 32, 2, 16, QueryPlace::kRegistersOverlaid, 1, handover};
}

constexpr TileShape narrow_shape(int head_dim_tile) {
  constexpr Handover kSlow = Handover::kMbarrierIfSlow;
  if (head_dim_tile <= 64) return {4, 1, 64, 2, 32, QueryPlace::kRegistersOverlaid, 3, kSlow};
  if (head_dim_tile <= 128) return {4, 1, 32, 2, 32, QueryPlace::kRegistersOverlaid, 3, kSlow};
  return {4, 1, 32, 2, 16, QueryPlace::kRegistersOverlaid, 2};
}

// As copies take next to no warp's time, and shared memory has room for tiles on their way, one
// block of an SM's worth of warps does: it reads each tile once where two blocks would read it
// twice.
constexpr TileShape persistent_shape(int head_dim_tile) {
  if (head_dim_tile <= 64) return {8, 2, 64, 1, 32, QueryPlace::kRegisters, 1, Handover::kTma, 8};
  if (head_dim_tile <= 128) return {8, 2, 64, 4, 32, QueryPlace::kSmem, 1, Handover::kTma, 4};
  return {8, 1, 32, 1, 16, QueryPlace::kRegisters, 1, Handover::kTma, 4};
}

constexpr TileShape general_shape(int head_dim_tile) {
  if (head_dim_tile <= 64) return {4, 2, 64, 2, 32, QueryPlace::kRegistersOverlaid, 2};
  if (head_dim_tile <= 96) return {4, 2, 32, 1, 32, QueryPlace::kRegistersOverlaid, 2};
  if (head_dim_tile <= 128) return {4, 2, 32, 1, 32, QueryPlace::kSmem, 2};
  return {8, 1, 32, 1, 32, QueryPlace::kRegistersOverlaid, 1, Handover::kMbarrier};
}

constexpr TileShape tile_shape(int head_dim_tile, int variant) {
  if (variant == kGeneral) return general_shape(head_dim_tile);
  if (variant == kPersistent) return persistent_shape(head_dim_tile);
  if (variant == kNarrow) return narrow_shape(head_dim_tile);
  return wide_shape(head_dim_tile,
                    variant == kPipelined ? Handover::kMbarrier : Handover::kBlockBarrier);
}

// Whether there is a kernel of the shape that packs query heads too (tile/rows.cuh): there is of
// that for few rows.
constexpr bool packs_heads(int variant) {
  return variant == kNarrow;
}

// Whether there is a kernel of this shape.
constexpr bool has_variant(int head_dim_tile, int variant) {
  if (variant == kSplit) return head_dim_tile <= 128;
  if (variant == kPipelined) return head_dim_tile > 128;
  if (variant == kSinglePass) return head_dim_tile == 64;
  if (variant == kPersistent) return head_dim_tile >= 64;
  return 0 <= variant && variant < kNumVariants;
}

constexpr int block_m(const TileShape& shape) {
  return shape.num_warps * shape.row_tiles * 16;
}

// Whether TMA brings Q, K and V.
constexpr bool uses_tma(int head_dim_tile, int variant) {
  return !splits_keys(variant) && tile_shape(head_dim_tile, variant).handover == Handover::kTma;
}

// Score modification: the keys of a run, and the shared memory for a tile's runs of a mask, one
// byte a key (score.cuh).
constexpr int kRunKeys = 8;
constexpr int mask_slot_bytes(int row_tiles, int block_n, int num_threads) {
  return row_tiles * 2 * (block_n / 32) * kRunKeys * num_threads;
}

// Whether the general kernel has no registers for what a thread needs once a tile: then shared
// memory has so much more per thread.
constexpr bool registers_are_scarce(int head_dim_tile) {
  return head_dim_tile > 192;
}
constexpr int kParkedBytes = 32;

// Byte offsets into dynamic shared memory; rows as in tile::SwizzledRows, in boxes of a warp's rows
// of Q and of a tile of K and V where TMA brings them.
struct SmemMap {
  int q;  // [block_m] rows, later those of out
  int k;  // [stages][block_n] rows
  int v;  // [stages][block_n] rows
  int mbarriers;
  int coordinates;  // of what TMA brings, kCoordinateBytes for each warp
  int parked;       // kParkedBytes for each thread of the general kernel
  int total;
};

constexpr int kCoordinateBytes = 32;  // ProducerState and ConsumerState

constexpr SmemMap smem_map(int head_dim_tile, int variant) {
  const TileShape shape = tile_shape(head_dim_tile, variant);
  const int q_bytes = block_m(shape) * head_dim_tile * 2;
  const int k_bytes = shape.stages * shape.block_n * head_dim_tile * 2;
  SmemMap map{};
  map.q = 0;
  map.k = shape.query_place == QueryPlace::kRegistersOverlaid ? 0 : q_bytes;
  map.v = map.k + k_bytes;
  map.mbarriers = map.v + k_bytes > q_bytes ? map.v + k_bytes : q_bytes;
  map.total = map.mbarriers;
  if (shape.handover != Handover::kBlockBarrier) map.total += shape.stages * 2 * 8;
  if (shape.handover == Handover::kTma) {
    map.coordinates = map.total + shape.num_warps * 8;
    map.total = map.coordinates + shape.num_warps * kCoordinateBytes;
  }
  map.parked = map.total;
  if (variant == kGeneral && registers_are_scarce(head_dim_tile))
    map.total += shape.num_warps * 32 * kParkedBytes;
  return map;
}

// Of the general kernel for a problem with or without a mask and a bias of so many bytes per
// element. Slots of both lie behind K and V.
constexpr int general_smem_bytes(int head_dim_tile, bool mask, int bias_bytes) {
  const TileShape shape = tile_shape(head_dim_tile, kGeneral);
  const int slots = mask_slot_bytes(shape.row_tiles, shape.block_n, shape.num_warps * 32);
  return smem_map(head_dim_tile, kGeneral).total + slots * ((mask ? 1 : 0) + bias_bytes);
}

// Blocks per SM that a shape's registers leave room for.
constexpr int blocks_per_sm(int head_dim_tile, int variant) {
  if (splits_keys(variant)) return split_shape(head_dim_tile, variant == kSinglePass).blocks_per_sm;
  return tile_shape(head_dim_tile, variant).blocks_per_sm;
}

constexpr TileConfig tile_config(int head_dim_tile, int variant) {
  if (splits_keys(variant)) return split_tile_config(head_dim_tile, variant == kSinglePass);
  const TileShape shape = tile_shape(head_dim_tile, variant);
  const int smem_bytes = variant == kGeneral ? general_smem_bytes(head_dim_tile, true, 4)
                                             : smem_map(head_dim_tile, variant).total;
  return {block_m(shape), shape.block_n, shape.num_warps, shape.stages, smem_bytes};
}

}  // namespace dlattn::wmma
