#pragma once

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::tile {

// Stores columns column .. column + kCount - 1 of one row of out, as far as the row reaches,
// normalised by `scale`. By one instruction if out is aligned to that (`store_bytes`), else element
// by element.
template <int kCount, typename T>
__device__ __forceinline__ void store_columns(T* out_row, int column, const float (&acc)[kCount],
                                              float scale, int columns, int store_bytes) {
  float x[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = scaled(acc[i], scale);
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  if (store_bytes >= kBytes && column + kCount <= columns) {
    store(out_row + column, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (column + i < columns) out_row[column + i] = from_float<T>(x[i]);
  }
}

}  // namespace dlattn::tile
