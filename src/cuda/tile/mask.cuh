#pragma once

#include <type_traits>

#include "core/problem/positions.h"
#include "cuda/plan/launch_shape.h"

namespace dlattn::tile {

using Range = dlattn::Range<int>;
using dlattn::contains;
using dlattn::contains_all;

// The keys that a query row sees by position, in the form that kernels use.
struct Mask : PositionMask<int> {
  template <typename Shape>  // LaunchShape, or what has its window
  __device__ __forceinline__ Mask(const Shape& shape, int shift, int seqlen_k)
      : PositionMask(shape.window, shift, seqlen_k) {}
};

// The same where rows are those of packed heads.
struct PackedMask : Mask {
  Divider packed_heads;

  __device__ __forceinline__ PackedMask(const LaunchShape& shape, int shift, int seqlen_k)
      : Mask(shape, shift, seqlen_k), packed_heads(shape.packed_heads) {}

  __device__ __forceinline__ int query(int row) const {
    return static_cast<int>(packed_heads.quotient(static_cast<unsigned>(row)));
  }
  __device__ __forceinline__ Range row(int i, int origin = 0) const {
    return Mask::row(query(i), origin);
  }
  __device__ __forceinline__ Range any_row(int first, int last) const {
    return Mask::any_row(query(first), query(last));
  }
  __device__ __forceinline__ Range every_row(int first, int last) const {
    return Mask::every_row(query(first), query(last));
  }
};

// The same in a sequence whose first `first_key` keys nobody sees.
template <typename Base>
struct PaddedMask : Base {
  int first_key;

  __device__ __forceinline__ PaddedMask(const LaunchShape& shape, int shift, int seqlen_k,
                                        int first_key)
      : Base(shape, shift, seqlen_k), first_key(first_key) {}

  __device__ __forceinline__ Range row(int i, int origin = 0) const {
    const Range range = Base::row(i, origin);
    return {max(range.begin, first_key - origin), range.end};
  }
  __device__ __forceinline__ Range any_row(int first, int last) const {
    const Range range = Base::any_row(first, last);
    return {max(range.begin, first_key), range.end};
  }
  __device__ __forceinline__ Range every_row(int first, int last) const {
    const Range range = Base::every_row(first, last);
    return {max(range.begin, first_key), range.end};
  }
};

template <bool kPacked>
using RowMask = std::conditional_t<kPacked, PackedMask, Mask>;

}  // namespace dlattn::tile
