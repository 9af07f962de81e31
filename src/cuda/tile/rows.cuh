#pragma once

#include <cstdint>

#include "cuda/tile/launch_shape.h"

namespace dlattn::tile {

// What the rows of a work item's head stand for. As a rule row r is query r. kPacked: the kernel's
// head is LaunchShape::packed_heads of q, which share a head of K and V, and row r is of query r /
// packed_heads and of the (r mod packed_heads)-th of them: so keys are read once for all of them,
// and what a row sees by position never decreases from one row to the next here, too.
template <bool kPacked>
struct Rows {
  const LaunchShape& shape;

  __device__ __forceinline__ int count(int seqlen_q) const {
    return kPacked ? seqlen_q * static_cast<int>(shape.packed_heads.divisor()) : seqlen_q;
  }
  __device__ __forceinline__ int query(int row) const {
    return kPacked ? static_cast<int>(shape.packed_heads.quotient(static_cast<unsigned>(row)))
                   : row;
  }
  // Which of the packed heads.
  __device__ __forceinline__ int head(int row) const {
    return kPacked ? static_cast<int>(shape.packed_heads.remainder(static_cast<unsigned>(row))) : 0;
  }
  // Elements from row 0 to a row of a tensor.
  __device__ __forceinline__ std::int64_t offset(int row, std::int64_t query_stride,
                                                 std::int64_t packed_stride) const {
    return kPacked ? query(row) * query_stride + head(row) * packed_stride : row * query_stride;
  }
};

}  // namespace dlattn::tile
