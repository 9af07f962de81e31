#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/tile/config.h"

namespace dlattn::sm90 {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;   // of queries, per consumer
constexpr int kBlockColumns = 64;    // tiles lie in shared memory in blocks of 64 columns,
constexpr int kBlockRowBytes = 128;  // whose rows are as long as the widest swizzle
constexpr int kItemBytes = 32;

// What beside the scale stands between q.k and the softmax; kernels of their own.
enum class Terms {
  kNone,
  kComputed,  // softcap, ALiBi
  kLoaded,    // bias, mask; those as well
};
constexpr const char* kTermsNames[] = {"", "computed", "loaded"};

// A consumer's tiles of bias and mask, and how many there are barriers for.
constexpr int kMaxSmem = 227 * 1024;  // of a block, with opt-in

constexpr int kTermRows = kWarpgroupRows, kTermKeys = 64, kTermStages = 2;

struct TileShape {
  int num_consumers;  // warpgroups beside the producer's
  int block_n;        // keys per tile
  int num_stages;     // tiles of K, and as many of V, in shared memory; a power of two
  int query_stages;   // tiles of Q; with two, the next one's copy runs under this one's products
  bool takes_turns;   // consumers start their products one after the other
  // Per thread; together no more than the block has at launch (DESIGN.md).
  int producer_registers, consumer_registers;
  // Whether a consumer starts a tile's scores ahead of the product with V of the tile before, so
  // that its softmax runs under that; otherwise under other consumers' products alone.
  bool runs_ahead = true;
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

// Of bias and mask. Threads of the producer's bring them to the consumers.
constexpr TileShape loaded_shape(int head_dim_tile) {
  if (head_dim_tile <= 64) return {3, kTermKeys, 4, 2, true, 32, 160};
  if (head_dim_tile <= 128) return {2, kTermKeys, 2, 2, true, 40, 232};
  if (head_dim_tile <= 192) return {2, kTermKeys, 2, 1, true, 40, 232};
  return {2, kTermKeys, 2, 1, false, 56, 224};
}

constexpr TileShape tile_shape(int head_dim_tile, int head_dim_v_tile, Terms terms = Terms::kNone) {
  if (terms == Terms::kLoaded) return loaded_shape(head_dim_tile);
  if (terms == Terms::kComputed && head_dim_tile <= 64) return {3, 128, 2, 2, true, 24, 160};
  if (terms == Terms::kComputed && head_dim_tile <= 128)
    return {3, 128, 2, 2, true, 24, 160, false};
  if (head_dim_tile <= 64) return {4, 64, 4, 2, true, 24, 112};
  if (head_dim_tile <= 128) return {2, 128, 2, 2, true, 24, 240};
  // Terms take registers of their own, and tiles of fewer keys leave them.
  if (terms == Terms::kComputed && head_dim_tile <= 192 && head_dim_v_tile <= 128)
    return {2, 96, 2, 1, true, 24, 240};
  if (terms == Terms::kComputed && head_dim_tile <= 192) return {2, 64, 2, 1, true, 24, 240};
  if (head_dim_tile <= 192 && head_dim_v_tile <= 128) return {2, 128, 2, 1, true, 24, 240};
  if (head_dim_tile <= 192) return {2, 96, 2, 1, true, 24, 240};
  return {2, 64, 2, 1, false, 24, 240};
}

// Whether results go from registers to global memory, so that Q's stage is free after its last
// product, or by way of that stage, which takes fewer registers.
constexpr bool stores_from_registers(int head_dim_tile, Terms terms) {
  return head_dim_tile > 96 && terms == Terms::kNone;
}

constexpr int block_m(const TileShape& shape) {
  return shape.num_consumers * kWarpgroupRows;
}
constexpr int num_threads(const TileShape& shape) {
  return (shape.num_consumers + 1) * kWarpgroupThreads;
}

// Bytes of `rows` rows in shared memory: blocks of [rows][64] elements, swizzled, the last of which
// may be wider than its columns.
constexpr int tile_bytes(int rows, int head_dim_tile) {
  return (head_dim_tile + kBlockColumns - 1) / kBlockColumns * rows * kBlockRowBytes;
}

// Byte offsets into dynamic shared memory.
struct SmemMap {
  int q;  // [query_stages][num_consumers] tiles of 64 rows, later those of out
  int k;  // [num_stages] tiles of block_n rows
  int v;  // the same of V
  int mbarriers;
  int items;  // [query_stages] of kItemBytes: which rows Q's are, where the lengths tell
  int terms;  // bias and mask, [num_consumers][stages] tiles; as many bytes as these take
  int total;  // without those
};

constexpr SmemMap smem_map(int head_dim_tile, int head_dim_v_tile, Terms terms = Terms::kNone) {
  const TileShape shape = tile_shape(head_dim_tile, head_dim_v_tile, terms);
  SmemMap map{};
  map.q = 0;
  map.k = map.q + shape.query_stages * tile_bytes(block_m(shape), head_dim_tile);
  map.v = map.k + shape.num_stages * tile_bytes(shape.block_n, head_dim_tile);
  map.mbarriers = map.v + shape.num_stages * tile_bytes(shape.block_n, head_dim_v_tile);
  map.items = map.mbarriers + (2 * shape.query_stages + 4 * shape.num_stages) * 8;
  if (terms == Terms::kLoaded) map.items += 2 * kTermStages * shape.num_consumers * 8;
  map.total = map.items + shape.query_stages * kItemBytes;
  if (terms == Terms::kLoaded) map.terms = map.total = (map.total + 1023) / 1024 * 1024;
  return map;
}

constexpr TileConfig tile_config(int head_dim_tile, int head_dim_v_tile,
                                 Terms terms = Terms::kNone) {
  const TileShape shape = tile_shape(head_dim_tile, head_dim_v_tile, terms);
  return {block_m(shape), shape.block_n, num_threads(shape) / 32, shape.num_stages,
          smem_map(head_dim_tile, head_dim_v_tile, terms).total};
}

}  // namespace dlattn::sm90
