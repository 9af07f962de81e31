#pragma once

#include <cstdint>

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

// Rows that lie in accumulators of products, a lane quad for each: of every 8 columns lane c has
// 2 c and the next.
namespace dlattn::tile {

// Transposes 4 x 4 words over a lane quad: word r of lane c becomes word c of lane r.
__device__ __forceinline__ void transpose_in_quad(std::uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const std::uint32_t given = upper ? words[i] : words[i + step];
      const std::uint32_t got = __shfl_xor_sync(kFullMask, given, step);
      (upper ? words[i] : words[i + step]) = got;
    }
  }
}

// Stores the quad's row, 16 bytes a lane: `out` and `columns` are those from this lane's first, of
// column lane % 4 * 8, on; out is aligned to 16 bytes, columns is 0 or less where there are none.
// `pair(j)`: this lane's two of columns 8 j and on. All lanes of the warp call it.
template <typename T, int kColumns, typename Pair>
__device__ __forceinline__ void store_quad_row(T* out, int columns, float scale, int lane,
                                               Pair pair) {
  static_assert(kColumns % 32 == 0, "a lane quad stores 32 columns of a row at once");
#pragma unroll
  for (int d = 0; d < kColumns; d += 32) {
    // Two columns of each 8, and then, of one 8, all.
    Vec<std::uint32_t, 4> words;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* const x = pair(d / 8 + e);
      words.x[e] = pack<T>(scaled(x[0], scale), scaled(x[1], scale));
    }
    transpose_in_quad(words.x, lane);
    if (d < columns) *reinterpret_cast<Vec<std::uint32_t, 4>*>(out + d) = words;
  }
}

}  // namespace dlattn::tile
