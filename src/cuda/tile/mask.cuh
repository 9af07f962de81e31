#pragma once

#include "cuda/tile/launch_shape.h"

namespace dlattn::tile {

// Keys begin .. end - 1.
struct KeyRange {
  int begin;
  int end;
};

// Which keys a query row sees by position. Ragged ends, causality (both alignments) and windows all come down to one
// range of keys per row, and both its ends never decrease from one row to the next.
struct Mask {
  int shift;
  int seqlen_k;
  int window_left;
  int window_right;

  __device__ __forceinline__ Mask(const LaunchShape& shape, int shift, int seqlen_k)
      : shift(shift), seqlen_k(seqlen_k), window_left(shape.window_left), window_right(shape.window_right) {}

  // Empty (end <= begin) if the row sees nothing.
  __device__ __forceinline__ KeyRange row(int i) const {
    const int position = i + shift;
    return {max(0, position - window_left), min(seqlen_k, position + window_right + 1)};
  }

  // The keys that at least one of rows first .. last sees.
  __device__ __forceinline__ KeyRange any_row(int first, int last) const { return {row(first).begin, row(last).end}; }

  // The keys that each of rows first .. last sees.
  __device__ __forceinline__ KeyRange every_row(int first, int last) const { return {row(last).begin, row(first).end}; }
};

__device__ __forceinline__ bool contains(const KeyRange& range, int key) { return key >= range.begin && key < range.end; }

// Whether keys first .. first + count - 1 all are in the range; whether any of them is.
__device__ __forceinline__ bool contains_all(const KeyRange& range, int first, int count) {
  return first >= range.begin && first + count <= range.end;
}
__device__ __forceinline__ bool contains_any(const KeyRange& range, int first, int count) {
  return first < range.end && first + count > range.begin;
}

}  // namespace dlattn::tile
