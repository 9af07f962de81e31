#pragma once

#include "cuda/forward/wmma/tiles.cuh"

namespace dlattn::wmma {

// Takes a consumer through `tiles`, from the last to the first; its `i` counts them, on from what
// it is. Tiles that every row sees whole go to step(), as long as none of the warp's row maxima is
// unscaled. It returns how many keys it has done, from the tile's first on: fewer than kBlockN
// where the row max overflowed. The tile's other keys, and other tiles, go to step_edge(n, begin,
// begun): keys from `begin` on; `begun`: step() has been at this tile.
//
// tiles_again() gives `tiles` once more, where they take fewer registers to work out than to keep
// while step() runs, and, unless kKeeps, while step_edge() does.
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
