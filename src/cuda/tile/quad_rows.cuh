#pragma once

#include <cstdint>

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

// Rows in accumulators of mma. Each row belongs to a lane quad, whose lane c has columns 2 c and
// 2 c + 1 of every 8.
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

// Stores the quad's row, 16 bytes a lane. `out` points to this lane's first column to store,
// lane % 4 * 8, and is aligned to 16 bytes. `columns`: how many columns exist from there on, 0 or
// less if none. pair(j): this lane's two accumulators of columns 8 j to 8 j + 7. All lanes of the
// warp call it.
template <typename T, int kColumns, typename Pair>
__device__ __forceinline__ void store_quad_row(T* out, int columns, float scale, int lane,
                                               Pair pair) {
  static_assert(kColumns % 32 == 0, "a lane quad stores 32 columns of a row at once");
#pragma unroll
  for (int d = 0; d < kColumns; d += 32) {
    // Before the transposition a lane has two columns of each of four groups of 8, after it all 8
    // of one group.
    Vec<std::uint32_t, 4> words;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* const x = pair(d / 8 + e);
      words.x[e] = pack<T>(scaled(x[0], scale), scaled(x[1], scale));
    }
    // seed: transpose-results
    transpose_in_quad(words.x, lane);
    if (d < columns) *reinterpret_cast<Vec<std::uint32_t, 4>*>(out + d) = words;
  }
}

}  // namespace dlattn::tile
