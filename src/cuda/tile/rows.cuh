#pragma once

#include <cstdint>

#include "cuda/tile/scheduler.cuh"

namespace dlattn::tile {

// Maps the rows of a work tile to queries and heads. As a rule row r is query r of its head.
// kPacked: the tile has LaunchShape::packed_heads heads of q, which share a head of K and V, and
// row r is query r / packed_heads of the (r mod packed_heads)-th of them: so keys are read once for
// all of them, and what a row sees by position never decreases from one row to the next here, too.
template <bool kPacked>
struct Rows {
  const LaunchShape& shape;

  // Tile `index`, its head being the first of its heads of q.
  __device__ __forceinline__ WorkTile work(unsigned index) const {
    WorkTile work = scheduled_tile(shape, index);
    if (kPacked) work.head *= static_cast<int>(shape.packed_heads.divisor());
    return work;
  }
  __device__ __forceinline__ int count(int seqlen_q) const {
    return kPacked ? seqlen_q * static_cast<int>(shape.packed_heads.divisor()) : seqlen_q;
  }
  // Elements from row 0 to a row of a tensor.
  __device__ __forceinline__ std::int64_t offset(int row, std::int64_t query_stride,
                                                 std::int64_t head_stride) const {
    if constexpr (!kPacked) return row * query_stride;
    const std::uint32_t query = shape.packed_heads.quotient(static_cast<std::uint32_t>(row));
    return query * query_stride + head(row) * head_stride;
  }
  // Which of the packed heads.
  __device__ __forceinline__ int head(int row) const {
    return static_cast<int>(shape.packed_heads.remainder(static_cast<std::uint32_t>(row)));
  }
};

}  // namespace dlattn::tile
