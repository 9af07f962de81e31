#pragma once

#include <cstdint>

#include "core/problem/positions.h"
#include "core/util/inline.h"
#include "dlattn/backward.h"
#include "dlattn/plan.h"

// The numbers that plan, launcher and kernels share. Plain C++.
namespace dlattn::backward_scalar {

// Tiles of kTile queries by kTile keys. A thread has 4 x 4 numbers of a tile.
constexpr int kTile = 64;
constexpr int kNumThreads = 256;
constexpr int kDepth = 32;  // columns of rows that are multiplied at once
// Elements from row to row in shared memory: whole vectors of 16 bytes, and a column of rows in
// several banks.
constexpr int kLd = kTile + 4;

// Floats of dynamic shared memory: the staged rows of two operands, or of one; then P or dS.
constexpr int kStageSize = 2 * kDepth * kLd;
static_assert(kStageSize == kTile * kLd);
constexpr int kSmemBytes = (kStageSize + kTile * kLd) * 4;

// The launches of a plan, as variants of the family.
enum Kernel : int { kKeys, kQueries, kBias };
constexpr const char* kKernelNames[] = {"keys", "queries", "bias"};

// Blocks of a grid: tiles vary fastest, then heads, then sequences.
struct Grid {
  std::int64_t tiles, heads, batches;

  DLATTN_SHARED std::int64_t count() const { return tiles * heads * batches; }
};
inline std::int64_t tiles(std::int64_t rows) {
  return (rows + kTile - 1) / kTile;
}
inline Grid key_grid(const AttentionParams& p) {
  return {tiles(p.seqlen_k), p.num_heads_kv, p.batch_size};
}
inline Grid query_grid(const AttentionParams& p) {
  return {tiles(p.seqlen_q), p.num_heads, p.batch_size};
}

// dbias has one number, or one of each query, key, head or sequence. It is the sum over what it has
// no stride for.
struct BiasShape {
  bool per_query, per_key;
  std::int64_t query_tiles, key_tiles;  // of dbias
  std::int64_t heads, batches;
};
inline BiasShape bias_shape(const BackwardParams& b) {
  const AttentionParams& p = b.forward;
  const auto has = [](std::int64_t stride, std::int64_t size) { return stride != 0 || size == 1; };
  BiasShape shape{};
  shape.per_query = has(b.dbias.row_stride, p.seqlen_q);
  shape.per_key = has(b.dbias.col_stride, p.seqlen_k);
  shape.query_tiles = shape.per_query ? tiles(p.seqlen_q) : 1;
  shape.key_tiles = shape.per_key ? tiles(p.seqlen_k) : 1;
  shape.heads = has(b.dbias.head_stride, p.num_heads) ? p.num_heads : 1;
  shape.batches = has(b.dbias.batch_stride, p.batch_size) ? p.batch_size : 1;
  return shape;
}
inline Grid bias_grid(const BiasShape& shape) {
  return {shape.query_tiles * shape.key_tiles, shape.heads, shape.batches};
}

// The arguments of the kernels beside the parameters. Made by the launcher.
struct Shape {
  Window<int> window;
  Grid grid;  // of this launch
  BiasShape bias;
  std::int64_t parts_per_head;  // Plan::parts_per_head
};

inline Shape make_shape(const BackwardParams& b, const Plan& plan, int kernel) {
  Shape shape{};
  shape.window = window_of<int>(b.forward);
  shape.parts_per_head = plan.parts_per_head;
  if (kernel == kBias) shape.bias = bias_shape(b);
  shape.grid = kernel == kKeys      ? key_grid(b.forward)
               : kernel == kQueries ? query_grid(b.forward)
                                    : bias_grid(shape.bias);
  return shape;
}

}  // namespace dlattn::backward_scalar
