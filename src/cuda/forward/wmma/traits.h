#pragma once

#include "core/util/inline.h"
#include "cuda/forward/wmma/split_traits.h"
#include "cuda/plan/tile_config.h"

namespace dlattn::wmma {

// Where a warp reads its rows of Q: from shared memory for every tile, or from registers, loaded
// once; then K and V may be laid over Q's shared memory.
enum class QueryLocation { kSmem, kRegisters, kRegistersOverlaid };

// How warps hand the stages of K and V over to each other (stages.cuh). kMbarrierIfSlow: by
// mbarriers where tensor cores are slow, else by the block's barrier; that is decided when the
// kernel is compiled. kTma: TMA fills the stages, from compute capability 9.0 on, and loads Q as
// well.
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
  int edge_keys;  // keys of a slice of an edge tile; fewer take fewer registers
  QueryLocation query_location;
  int blocks_per_sm;  // for which registers must leave room
  Handover handover = Handover::kBlockBarrier;
  int stages = 2;  // tiles of K and V in shared memory
};

constexpr TileShape wide_shape(int head_dim_tile, Handover handover) {
  if (head_dim_tile <= 64) return {4, 2, 64, 1, 32, QueryLocation::kRegisters, 2, handover};
  if (head_dim_tile <= 128) return {4, 2, 64, 4, 32, QueryLocation::kSmem, 2, handover};
  return {8, 1, 32, 2, 16, QueryLocation::kRegistersOverlaid, 1, handover};
}

constexpr TileShape narrow_shape(int head_dim_tile) {
  constexpr Handover kSlow = Handover::kMbarrierIfSlow;
  if (head_dim_tile <= 64) return {4, 1, 64, 2, 32, QueryLocation::kRegistersOverlaid, 3, kSlow};
  if (head_dim_tile <= 128) return {4, 1, 32, 2, 32, QueryLocation::kRegistersOverlaid, 3, kSlow};
  return {4, 1, 32, 2, 16, QueryLocation::kRegistersOverlaid, 2};
}

// One block has all warps of an SM. Copies by TMA take hardly any of the warps' time, so a second
// block need not fill it, and one block reads each tile once where two would read it twice.
constexpr TileShape persistent_shape(int head_dim_tile) {
  if (head_dim_tile <= 64)
    return {8, 2, 64, 1, 32, QueryLocation::kRegisters, 1, Handover::kTma, 8};
  if (head_dim_tile <= 128) return {8, 2, 64, 4, 32, QueryLocation::kSmem, 1, Handover::kTma, 4};
  return {8, 1, 32, 1, 16, QueryLocation::kRegisters, 1, Handover::kTma, 4};
}

constexpr TileShape general_shape(int head_dim_tile) {
  if (head_dim_tile <= 64) return {4, 2, 64, 2, 32, QueryLocation::kRegistersOverlaid, 2};
  if (head_dim_tile <= 96) return {4, 2, 32, 1, 32, QueryLocation::kRegistersOverlaid, 2};
  if (head_dim_tile <= 128) return {4, 2, 32, 1, 32, QueryLocation::kSmem, 2};
  return {8, 1, 32, 1, 32, QueryLocation::kRegistersOverlaid, 1, Handover::kMbarrier};
}

constexpr TileShape tile_shape(int head_dim_tile, int variant) {
  if (variant == kGeneral) return general_shape(head_dim_tile);
  if (variant == kPersistent) return persistent_shape(head_dim_tile);
  if (variant == kNarrow) return narrow_shape(head_dim_tile);
  return wide_shape(head_dim_tile,
                    variant == kPipelined ? Handover::kMbarrier : Handover::kBlockBarrier);
}

// Whether a variant has kernels that pack query heads (tile/rows.cuh) too: the one for few rows
// has.
constexpr bool packs_heads(int variant) {
  return variant == kNarrow;
}

// Whether a variant has kernels for keys in a cache too (cached_producer.cuh): the one that is the
// fastest for most problems where there is no sm90.
constexpr bool reads_caches(int head_dim_tile, int variant) {
  return variant == kNarrow && (head_dim_tile == 64 || head_dim_tile == 128);
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

// Which of a block's groups of rows a warp has. Under causality later rows see more keys, so the
// two warps of eight that share a scheduler, w and w + 4, have an early group and a late one.
DLATTN_SHARED constexpr int row_group(int num_warps, int warp) {
  return num_warps == 8 && warp >= 4 ? 11 - warp : warp;
}

// Whether TMA loads Q, K and V.
constexpr bool uses_tma(int head_dim_tile, int variant) {
  return !splits_keys(variant) && tile_shape(head_dim_tile, variant).handover == Handover::kTma;
}

// Score modification: the keys of a run, and the shared memory for a tile's runs of a mask, one
// byte a key (score.cuh).
constexpr int kRunKeys = 8;
constexpr int mask_slot_bytes(int row_tiles, int block_n, int num_threads) {
  return row_tiles * 2 * (block_n / 32) * kRunKeys * num_threads;
}

// Whether the general kernel has no registers for what a thread needs once a tile. It keeps that in
// shared memory then, kParkedBytes for each thread.
constexpr bool registers_are_scarce(int head_dim_tile) {
  return head_dim_tile > 192;
}
constexpr int kParkedBytes = 32;

// Byte offsets into dynamic shared memory. Rows are tile::SwizzledRows. Where TMA loads them, a box
// has a warp's rows of Q, or a tile's of K or V.
struct SmemMap {
  int q;  // [block_m] rows, later those of out
  int k;  // [stages][block_n] rows
  int v;  // [stages][block_n] rows
  int mbarriers;
  int coordinates;  // of what TMA loads, kCoordinateBytes for each warp
  int parked;       // kParkedBytes for each thread of the general kernel
  int total;
};

constexpr int kMbarrierBytes = 8;     // ptx::kMbarrierBytes, for host code
constexpr int kCoordinateBytes = 32;  // ProducerState and ConsumerState

constexpr SmemMap smem_map(int head_dim_tile, int variant) {
  const TileShape shape = tile_shape(head_dim_tile, variant);
  const int q_bytes = block_m(shape) * head_dim_tile * kElementBytes;
  const int k_bytes = shape.stages * shape.block_n * head_dim_tile * kElementBytes;
  SmemMap map{};
  map.q = 0;
  map.k = shape.query_location == QueryLocation::kRegistersOverlaid ? 0 : q_bytes;
  map.v = map.k + k_bytes;
  map.mbarriers = map.v + k_bytes > q_bytes ? map.v + k_bytes : q_bytes;
  map.total = map.mbarriers;
  if (shape.handover != Handover::kBlockBarrier) map.total += shape.stages * 2 * kMbarrierBytes;
  if (shape.handover == Handover::kTma) {
    map.coordinates = map.total + shape.num_warps * kMbarrierBytes;
    map.total = map.coordinates + shape.num_warps * kCoordinateBytes;
  }
  map.parked = map.total;
  if (variant == kGeneral && registers_are_scarce(head_dim_tile))
    map.total += shape.num_warps * 32 * kParkedBytes;
  return map;
}

// The shared memory of the general kernel for a problem with or without a mask, and with a bias of
// `bias_bytes` per element. The slots of both (score.cuh) follow what SmemMap has.
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
