#pragma once

#include "cuda/forward/wmma/products.cuh"
#include "cuda/forward/wmma/softmax.cuh"
#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/ptx/smem.cuh"

// In which order a warp goes about its tiles, and how about those at the edges.
namespace dlattn::wmma {

// An edge tile, its keys from `begin` on, in slices of kSliceKeys, without those that the warp's
// rows, from `first_row` on, do not see.
template <typename T, int kHeadDim, int kBlockN, int kSliceKeys, int kBoxRows = 0, int kRowTiles,
          typename Mask, typename LoadQ>
__device__ __forceinline__ void attend_edge(SpeculativeSoftmax<kRowTiles>& softmax,
                                            float (&acc_o)[kRowTiles][kHeadDim / 8][4],
                                            const Mask& mask, int first_row, int n, int begin,
                                            ptx::SmemAddress lane_k, ptx::SmemAddress lane_v,
                                            float scale_log2, int lane_idx, const LoadQ& load_q) {
  constexpr int kRowBytes = tile::SwizzledRows<kHeadDim, kBoxRows>::kRowBytes;
  const int last_row = first_row + kRowTiles * 16 - 1;
#pragma unroll 1
  for (int first = kBlockN - kSliceKeys; first + kSliceKeys > begin; first -= kSliceKeys) {
    const int n0 = n * kBlockN + first;
    const tile::Range any = mask.any_row(first_row, last_row);
    if (any.begin >= n0 + kSliceKeys || any.end <= n0) continue;
    float acc_s[kRowTiles][kSliceKeys / 8][4];
    multiply_qk<T, kHeadDim, 0, kSliceKeys, kBoxRows>(acc_s, lane_k + first * kRowBytes, load_q);
    if (!tile::contains_all(mask.every_row(first_row, last_row), n0, kSliceKeys))
      apply_mask(acc_s, mask, first_row + lane_idx / 4, n0, lane_idx);
    if (first < begin) hide_keys(acc_s, begin - first, lane_idx);
    std::uint32_t rP[kRowTiles][kSliceKeys / 16][4];
    softmax.template first_probabilities<T, 0, kSliceKeys>(acc_s, scale_log2, false, rP, acc_o);
    multiply_pv<T, kHeadDim, 0, kSliceKeys, kBoxRows>(acc_o, rP, lane_v + first * kRowBytes);
  }
}

// Walks `tiles`, from the last to the first; `i` counts them, on from what it is. Those that
// every row sees whole by full(), as long as all of the warp's references are scaled. It returns
// how many keys it has done, from the tile's first on: fewer than kBlockN where scores have
// outgrown references by more than fp32 holds. The tile's others, and other tiles, by edge(n,
// begin, begun), with references raised beforehand: keys from `begin` on; `begun`: full() has been
// at this tile. `again()`: `tiles` once more, where it takes fewer registers to work out than to
// keep which of them are edges while the others are walked, and unless kKeeps edges too.
template <int kBlockN, bool kKeeps, int kRowTiles, typename Full, typename Edge, typename Again>
__device__ __forceinline__ void walk_tiles(int& i, TileRange tiles,
                                           const SpeculativeSoftmax<kRowTiles>& softmax,
                                           const Full& full, const Edge& edge, const Again& again) {
  for (const int end = i + (tiles.end - tiles.begin); i < end; ++i) {
    if constexpr (!kKeeps) tiles = again();
    const auto number = [&] { return tiles.begin + (end - 1 - i); };
    int done = kBlockN;
    if (number() < tiles.full_end && !softmax.unscaled) {
      const int full_end = end - (tiles.full_begin - tiles.begin);
#pragma unroll 1
      for (; i < full_end; ++i) {
        done = full();
        if (done < kBlockN) break;
      }
      if (i >= end) break;
      if constexpr (kKeeps) tiles = again();
    }
    const bool begun = done < kBlockN;
    edge(number(), begun ? done : 0, begun);
  }
}

}  // namespace dlattn::wmma
