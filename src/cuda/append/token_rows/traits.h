#pragma once

#include <cstdint>

#include "core/problem/alignment.h"
#include "core/problem/append.h"
#include "core/util/inline.h"

// The numbers that plan, launcher and kernel share. Plain C++.
namespace dlattn::append::token_rows {

constexpr int kNumThreads = 256;
constexpr int kLanes = 16;  // of a head's row: 16 bytes each are one of 128 numbers of 16 bits
constexpr int kRowsPerBlock = kNumThreads / kLanes;

// Numbers that a lane moves at once: 16 bytes of k.
constexpr int wide_access(std::int64_t element_bytes) {
  return static_cast<int>(16 / element_bytes);
}

// Heads' rows of a token: of k, of v, of q.
inline std::int64_t rows_of_token(const AppendParams& p) {
  return 2 * p.num_heads_kv + (p.q.data ? p.num_heads : 0);
}
// Thread blocks of a token.
inline std::int64_t num_parts(const AppendParams& p) {
  return (rows_of_token(p) + kRowsPerBlock - 1) / kRowsPerBlock;
}

// The arguments of the kernels beside the parameters. Made by the launcher.
struct Shape {
  std::uint32_t parts;
  bool wide_k, wide_v, wide_q;  // rows are moved in wide accesses, else number by number
};

inline Shape make_shape(const AppendParams& p) {
  const std::int64_t bytes = size_of(p.k.dtype), width = wide_access(bytes);
  const bool rotates = p.rotary_cos.data;
  const auto is_aligned = [&](const auto& x, const core::TensorSizes& sizes) {
    const std::int64_t element = size_of(x.dtype);
    return core::row_alignment(x, sizes, element) >= lesser<std::int64_t>(width * element, 16);
  };
  const core::TensorSizes tables = {1, p.rotary_positions, 1};
  const bool tables_aligned =
      !rotates || (p.rotary_dim % (2 * width) == 0 && is_aligned(p.rotary_cos, tables) &&
                   is_aligned(p.rotary_sin, tables));
  const core::TensorSizes keys = new_sizes(p, p.num_heads_kv), cached = cache_sizes(p);
  const core::TensorSizes queries = new_sizes(p, p.num_heads);
  Shape shape{};
  shape.parts = static_cast<std::uint32_t>(num_parts(p));
  shape.wide_k = p.head_dim % width == 0 && is_aligned(p.k, keys) &&
                 is_aligned(p.k_cache, cached) && tables_aligned;
  shape.wide_v =
      p.head_dim_v % width == 0 && is_aligned(p.v, keys) && is_aligned(p.v_cache, cached);
  shape.wide_q = p.head_dim % width == 0 && is_aligned(p.q, queries) &&
                 is_aligned(p.q_out, queries) && tables_aligned;
  return shape;
}

}  // namespace dlattn::append::token_rows
