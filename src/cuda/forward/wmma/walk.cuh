#pragma once

#include "cuda/forward/wmma/tiles.cuh"

namespace dlattn::wmma {

// Takes a consumer through the tiles of `first`, from the last to the first, and counts them up in
// consumer.i. Calls step() for full tiles, as long as none of the warp's row maxima is unscaled.
// step() returns how many keys it has done, from the tile's first on: fewer than kBlockN where the
// speculative row max overflowed. Calls step_edge(n, begin, begun) for the tile's other keys, which
// are those from `begin` on, and for edge tiles. `begun`: whether step() has been at this tile.
//
// consumer.tiles_again() returns `first` again. It is computed again where that takes fewer
// registers than keeping it: over step(), and, unless kKeeps, over step_edge().
template <int kBlockN, bool kKeeps, typename Consumer, typename WarpRows>
__device__ __forceinline__ void walk_tiles(Consumer& consumer, WarpRows& rows,
                                           const TileRange& first) {
  TileRange tiles = first;
  int& i = consumer.i;
  for (const int end = i + (tiles.end - tiles.begin); i < end; ++i) {
    if constexpr (!kKeeps) tiles = consumer.tiles_again(first);
    const auto number = [&] { return tiles.begin + (end - 1 - i); };
    int done = kBlockN;
    if (number() < tiles.full_end && !rows.softmax.unscaled) {
      const int full_end = end - (tiles.full_begin - tiles.begin);
#pragma unroll 1
      for (; i < full_end; ++i) {
        done = consumer.step(rows);
        if (done < kBlockN) break;
      }
      if (i >= end) break;
      if constexpr (kKeeps) tiles = consumer.tiles_again(first);
    }
    const bool begun = done < kBlockN;
    consumer.step_edge(rows, number(), begun ? done : 0, begun);
  }
}

}  // namespace dlattn::wmma
