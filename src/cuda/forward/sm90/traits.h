#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/plan/tile_config.h"
#include "cuda/tile/wgmma/warpgroup.h"

namespace dlattn::sm90 {

using tile::wgmma::kBlockRowBytes;
using tile::wgmma::kWarpgroupRows;
using tile::wgmma::kWarpgroupThreads;
using tile::wgmma::kWorkTileBytes;

constexpr int kBlockColumns = 64;  // tiles lie in shared memory in blocks of as many columns

// The score modification of a problem.
enum class ScoreMod {
  kNone,
  kComputed,  // softcap, ALiBi
  kBiasMask,  // bias, mask; those as well
};

// The kernels of a tile: one for each score modification, and of plain scores one whose blocks have
// fewer rows, for grids of few or of uneven blocks, and one in clusters of two blocks that read the
// same keys.
enum class Variant { kTall, kComputed, kLoaded, kShort, kPairs };
constexpr const char* kVariantNames[] = {"tall", "softcap_alibi", "bias_mask", "short", "pairs"};
constexpr const char* name_of(Variant variant) {
  return kVariantNames[static_cast<int>(variant)];
}

constexpr ScoreMod score_mod_of(Variant variant) {
  if (variant == Variant::kComputed) return ScoreMod::kComputed;
  return variant == Variant::kLoaded ? ScoreMod::kBiasMask : ScoreMod::kNone;
}

// Whether a tile has kernels of short blocks: of fixed lengths alone.
constexpr bool has_short_blocks(int head_dim_tile) {
  return head_dim_tile <= 128;
}

// Whether a tile has kernels of blocks in pairs: of fixed lengths alone.
constexpr bool has_pairs(int head_dim_tile) {
  return head_dim_tile == 256;
}
// Blocks of a cluster, which read the same keys: each one copies half of a tile to both.
constexpr int cluster_blocks(Variant variant) {
  return variant == Variant::kPairs ? 2 : 1;
}

// Whether a variant has a kernel for keys in a cache too (cached_kernel.cuh).
constexpr bool reads_caches(int head_dim_tile, Variant variant) {
  return (head_dim_tile == 64 || head_dim_tile == 128) &&
         (variant == Variant::kTall || variant == Variant::kShort);
}

// Whether one kernel of a variant serves fixed lengths and varlen: its code is long, and walks are
// too long for what it takes to be told each work tile by the producer.
constexpr bool serves_all_lengths(Variant variant) {
  return variant == Variant::kComputed;
}

constexpr int kMaxSmem = 227 * 1024;  // of a block, with opt-in

// A consumer's tiles of bias and mask, and how many there are barriers for.
constexpr int kBiasMaskRows = kWarpgroupRows, kBiasMaskKeys = 64, kBiasMaskStages = 2;

struct TileShape {
  int num_consumers = 2;  // warpgroups beside the producer's
  // Consumers that share rows: each takes every so many-th tile of keys, and their results are
  // merged in shared memory.
  int key_groups = 1;
  int block_n = 64;      // keys per tile
  int num_stages = 2;    // tiles of K, and as many of V, in shared memory; a power of two
  int query_stages = 2;  // tiles of Q; with two, the next one's copy runs under this one's products
  bool ping_pong = true;  // consumers start their products one after the other
  // Per thread; together no more than the block has at launch (DESIGN.md).
  int producer_registers = 24, consumer_registers = 240;
  // Whether a consumer starts a tile's scores before the product with V of the tile before it, so
  // that its softmax runs under that; otherwise under other consumers' products alone.
  bool pipelined = true;
};

// The tile of V's head dim, in the instance whose tile holds both head dims: multi-head latent
// attention has 192 and 128.
constexpr int head_dim_v_tile(int head_dim_tile, std::int64_t head_dim_v) {
  return head_dim_tile == 192 && head_dim_v <= 128 ? 128 : head_dim_tile;
}

// Calls run(tile) with it, as a compile-time constant.
template <int kHeadDim, typename Run>
void with_head_dim_v_tile(std::int64_t head_dim_v, Run run) {
  constexpr int kNarrowest = head_dim_v_tile(kHeadDim, 1);
  if (head_dim_v_tile(kHeadDim, head_dim_v) == kNarrowest) {
    run(std::integral_constant<int, kNarrowest>{});
  } else {
    run(std::integral_constant<int, kHeadDim>{});
  }
}

// With bias or mask, which threads of the producer's bring to the consumers.
constexpr TileShape bias_mask_shape(int head_dim_tile) {
  TileShape shape;
  shape.block_n = kBiasMaskKeys;
  shape.producer_registers = 40;
  shape.consumer_registers = 232;
  if (head_dim_tile > 128) shape.query_stages = 1;
  if (head_dim_tile <= 64) {
    shape.num_consumers = 3;
    shape.num_stages = 4;
    shape.producer_registers = 32;
    shape.consumer_registers = 160;
  }
  if (head_dim_tile > 192) {
    shape.ping_pong = false;
    shape.producer_registers = 56;
    shape.consumer_registers = 224;
  }
  return shape;
}

// With softcap or ALiBi, which take registers of their own: tiles of fewer keys, or three
// consumers.
constexpr TileShape computed_shape(int head_dim_tile, int head_dim_v_tile) {
  TileShape shape;
  if (head_dim_tile <= 128) {
    shape.num_consumers = 3;
    shape.block_n = 128;
    shape.consumer_registers = 160;
    shape.pipelined = head_dim_tile <= 64;
    return shape;
  }
  shape.query_stages = 1;
  if (head_dim_v_tile <= 128) shape.block_n = 96;
  shape.ping_pong = head_dim_tile <= 192;
  return shape;
}

constexpr TileShape plain_shape(int head_dim_tile, int head_dim_v_tile) {
  TileShape shape;
  if (head_dim_tile <= 64) {
    shape.num_consumers = 4;
    shape.num_stages = 4;
    shape.consumer_registers = 112;
    return shape;
  }
  if (head_dim_tile <= 128) {
    shape.num_consumers = 3;
    shape.num_stages = 4;
    shape.consumer_registers = 160;
    return shape;
  }
  if (head_dim_tile <= 192) shape.block_n = head_dim_v_tile <= 128 ? 128 : 96;
  if (head_dim_tile > 128) shape.query_stages = 1;
  shape.ping_pong = head_dim_tile <= 192;
  return shape;
}

constexpr TileShape short_shape(int head_dim_tile, int head_dim_v_tile) {
  TileShape shape = plain_shape(head_dim_tile, head_dim_v_tile);
  if (head_dim_tile <= 64) {
    shape.key_groups = 2;
  } else if (head_dim_tile <= 128) {
    shape.num_consumers = 2;
    shape.block_n = 128;
    shape.num_stages = 2;
    shape.consumer_registers = 240;
  }
  return shape;
}

constexpr TileShape tile_shape(int head_dim_tile, int head_dim_v_tile,
                               Variant variant = Variant::kTall) {
  if (variant == Variant::kLoaded) return bias_mask_shape(head_dim_tile);
  if (variant == Variant::kComputed) return computed_shape(head_dim_tile, head_dim_v_tile);
  if (variant == Variant::kShort) return short_shape(head_dim_tile, head_dim_v_tile);
  return plain_shape(head_dim_tile, head_dim_v_tile);
}

// The same for keys in a cache, whose pages the producer looks up, which takes more registers: what
// is left of the block's, or else some of two consumers'.
constexpr TileShape cached_shape(int head_dim_tile, int head_dim_v_tile, Variant variant) {
  TileShape shape = tile_shape(head_dim_tile, head_dim_v_tile, variant);
  const bool is_left = shape.num_consumers > 2;
  shape.producer_registers += is_left ? 8 : 16;
  shape.consumer_registers -= is_left ? 0 : 8;
  return shape;
}

// Whether results go from registers to global memory, so that Q's stage is free after its last
// product, or by way of that stage, which takes fewer registers.
constexpr bool stores_from_registers(int head_dim_tile, Variant variant) {
  return head_dim_tile > 96 && score_mod_of(variant) == ScoreMod::kNone;
}

// Whether a consumer finds its next work tile under this one's last product, with registers to
// spare for it while results are stored: tiles of rows are short, and few consumers hide what lies
// between two of them.
constexpr bool finds_next_early(int head_dim_tile, Variant variant) {
  return head_dim_tile > 64 && variant == Variant::kShort;
}

constexpr int row_groups(const TileShape& shape) {
  return shape.num_consumers / shape.key_groups;
}
constexpr int block_m(const TileShape& shape) {
  return row_groups(shape) * kWarpgroupRows;
}
constexpr int num_threads(const TileShape& shape) {
  return (shape.num_consumers + 1) * kWarpgroupThreads;
}

// Bytes of `rows` rows in shared memory: blocks of [rows][64] elements, swizzled, the last of which
// may be wider than its columns.
constexpr int tile_bytes(int rows, int head_dim_tile) {
  return (head_dim_tile + kBlockColumns - 1) / kBlockColumns * rows * kBlockRowBytes;
}

// Bytes of what a consumer leaves to the one that it shares rows with.
constexpr int part_bytes(int head_dim_v_tile) {
  return kWarpgroupThreads * (head_dim_v_tile / 2 + 5) * 4;
}

// Byte offsets into dynamic shared memory.
struct SmemMap {
  int q;  // [query_stages][row groups] tiles of 64 rows, later those of out
  int k;  // [num_stages] tiles of block_n rows
  int v;  // the same of V
  int mbarriers;
  int work_tiles;  // [query_stages] of kWorkTileBytes: which rows Q's are; used with varlen
  int parts;       // [row groups] of part_bytes(), with two groups of keys
  int bias_mask;   // [num_consumers][stages] tiles; as many bytes as these take
  int total;       // without those
};

constexpr SmemMap smem_map(int head_dim_tile, int head_dim_v_tile,
                           Variant variant = Variant::kTall) {
  const TileShape shape = tile_shape(head_dim_tile, head_dim_v_tile, variant);
  SmemMap map{};
  map.q = 0;
  map.k = map.q + shape.query_stages * tile_bytes(block_m(shape), head_dim_tile);
  map.v = map.k + shape.num_stages * tile_bytes(shape.block_n, head_dim_tile);
  map.mbarriers = map.v + shape.num_stages * tile_bytes(shape.block_n, head_dim_v_tile);
  map.work_tiles = map.mbarriers + (2 * shape.query_stages + 4 * shape.num_stages) * 8;
  if (variant == Variant::kLoaded) map.work_tiles += 2 * kBiasMaskStages * shape.num_consumers * 8;
  map.parts = map.work_tiles + shape.query_stages * kWorkTileBytes;
  map.total = map.parts;
  if (shape.key_groups > 1) map.total += row_groups(shape) * part_bytes(head_dim_v_tile);
  if (variant == Variant::kLoaded) map.bias_mask = map.total = (map.total + 1023) / 1024 * 1024;
  return map;
}

constexpr TileConfig tile_config(int head_dim_tile, int head_dim_v_tile,
                                 Variant variant = Variant::kTall) {
  const TileShape shape = tile_shape(head_dim_tile, head_dim_v_tile, variant);
  return {block_m(shape), shape.block_n, num_threads(shape) / 32, shape.num_stages,
          smem_map(head_dim_tile, head_dim_v_tile, variant).total};
}

}  // namespace dlattn::sm90
