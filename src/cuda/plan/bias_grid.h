#pragma once

#include <cstdint>

#include "dlattn/backward.h"

// The shape of the launch of dbias (dbias_launch.h).
namespace dlattn {

// The numbers that dbias has; it is the sum over the rest. A block makes a tile of it.
struct BiasGrid {
  bool per_query, per_key;
  int query_tiles, key_tiles;  // of dbias
  int heads, batches;

  std::int64_t count() const { return std::int64_t{query_tiles} * key_tiles * heads * batches; }
};

struct BiasTile {
  int block_m, block_n;
};
constexpr BiasTile bias_tile(int head_dim_tile) {
  return head_dim_tile <= 128 ? BiasTile{128, 64} : BiasTile{64, 32};
}

constexpr int kBiasVariant = 3;
constexpr const char* kBiasName = "bias";
constexpr int kBiasWarps = 8;
// Tiles of Q, dO, K and V.
constexpr int bias_smem_bytes(int head_dim_tile) {
  const BiasTile tile = bias_tile(head_dim_tile);
  return 2 * (tile.block_m + tile.block_n) * head_dim_tile * 2;
}

inline BiasGrid bias_grid(const BackwardParams& b, int head_dim_tile) {
  const AttentionParams& p = b.forward;
  const BiasTile tile = bias_tile(head_dim_tile);
  const auto has = [](std::int64_t stride, std::int64_t size) { return stride != 0 || size == 1; };
  BiasGrid grid{};
  grid.per_query = has(b.dbias.row_stride, p.seqlen_q);
  grid.per_key = has(b.dbias.col_stride, p.seqlen_k);
  const auto tiles = [](bool has_all, std::int64_t seqlen, int rows) {
    return has_all ? static_cast<int>((seqlen + rows - 1) / rows) : 1;
  };
  grid.query_tiles = tiles(grid.per_query, p.seqlen_q, tile.block_m);
  grid.key_tiles = tiles(grid.per_key, p.seqlen_k, tile.block_n);
  grid.heads = has(b.dbias.head_stride, p.num_heads) ? static_cast<int>(p.num_heads) : 1;
  grid.batches = has(b.dbias.batch_stride, p.batch_size) ? static_cast<int>(p.batch_size) : 1;
  return grid;
}

}  // namespace dlattn
