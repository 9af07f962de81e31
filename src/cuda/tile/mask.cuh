#pragma once

#include <type_traits>

#include "cuda/tile/launch_shape.h"

namespace dlattn::tile {

// Keys, or rows, begin .. end - 1; empty if end <= begin.
struct Range {
  int begin;
  int end;
};

// Which keys a query row sees by position. Ragged ends, causality (both alignments) and windows all
// come down to one range of keys per row, and both its ends never decrease from one row to the
// next.
struct Mask {
  int shift;
  int seqlen_k;
  int window_left;
  int window_right;

  template <typename Shape>  // LaunchShape, or what has its windows
  __device__ __forceinline__ Mask(const Shape& shape, int shift, int seqlen_k)
      : shift(shift),
        seqlen_k(seqlen_k),
        window_left(shape.window_left),
        window_right(shape.window_right) {}

  // The keys that row i sees, counted from key `origin`.
  __device__ __forceinline__ Range row(int i, int origin = 0) const {
    const int position = i + shift - origin;
    return {max(-origin, position - window_left),
            min(seqlen_k - origin, position + window_right + 1)};
  }

  // The rows that see key j.
  __device__ __forceinline__ Range column(int j) const {
    const int position = j - shift;
    return {position - window_right,
            j < seqlen_k ? position + window_left + 1 : position - window_right};
  }

  // The keys that at least one of rows first .. last sees.
  __device__ __forceinline__ Range any_row(int first, int last) const {
    return {row(first).begin, row(last).end};
  }

  // The keys that each of rows first .. last sees.
  __device__ __forceinline__ Range every_row(int first, int last) const {
    return {row(last).begin, row(first).end};
  }
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

template <bool kPacked>
using RowMask = std::conditional_t<kPacked, PackedMask, Mask>;

__device__ __forceinline__ bool contains(const Range& range, int i) {
  return i >= range.begin && i < range.end;
}

// Whether all of first .. first + count - 1 are in the range.
__device__ __forceinline__ bool contains_all(const Range& range, int first, int count) {
  return first >= range.begin && first + count <= range.end;
}

}  // namespace dlattn::tile
