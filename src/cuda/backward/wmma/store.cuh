#pragma once

#include <cstdint>

#include "cuda/tile/quad_rows.cuh"

namespace dlattn::backward_wmma {

// Stores the quad's row of a gradient, scaled. `out` is the row's first element; pair(j) as in
// tile::store_quad_row. All lanes of the warp call it; `exists` is whether the row does.
template <typename T, int kColumns, typename Pair>
__device__ __forceinline__ void store_row(T* out, bool exists, int columns, int store_bytes,
                                          float scale, int lane, Pair pair) {
  if (store_bytes == 16) {
    const int first = lane % 4 * 8;
    tile::store_quad_row<T, kColumns>(out + first, exists ? columns - first : 0, scale, lane, pair);
    return;
  }
  if (!exists) return;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * j + lane % 4 * 2 + e;
      if (column < columns) out[column] = tile::from_float<T>(pair(j)[e] * scale);
    }
  }
}

}  // namespace dlattn::backward_wmma
