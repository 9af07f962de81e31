#pragma once

#include <type_traits>

#include "cuda/ptx/smem.cuh"
#include "cuda/wmma/products.cuh"
#include "cuda/wmma/softmax.cuh"
#include "cuda/wmma/tiles.cuh"

// In which order a warp goes about its tiles, and how about those at the edges.
namespace dlattn::wmma {

// How a tile is gone about: as an edge tile, or as one that every row sees whole, with references
// that are likely to hold.
enum class Walk { kEdge, kFull };

// An edge tile in slices of kSliceKeys keys, without those that the warp's rows, from `first_row`
// on, do not see.
template <typename T, int kHeadDim, int kBlockN, int kSliceKeys, int kBoxRows = 0, int kRowTiles,
          typename Mask, typename LoadQ>
__device__ __forceinline__ void attend_edge(SpeculativeSoftmax<kRowTiles>& softmax,
                                            float (&acc_o)[kRowTiles][kHeadDim / 8][4],
                                            const Mask& mask, int first_row, int n,
                                            ptx::SmemAddress lane_k, ptx::SmemAddress lane_v,
                                            float scale_log2, int lane_idx, const LoadQ& load_q) {
  constexpr int kRowBytes = tile::SwizzledRows<kHeadDim, kBoxRows>::kRowBytes;
  const int last_row = first_row + kRowTiles * 16 - 1;
#pragma unroll 1
  for (int first = kBlockN - kSliceKeys; first >= 0; first -= kSliceKeys) {
    const int n0 = n * kBlockN + first;
    const tile::Range any = mask.any_row(first_row, last_row);
    if (any.begin >= n0 + kSliceKeys || any.end <= n0) continue;
    float acc_s[kRowTiles][kSliceKeys / 8][4];
    multiply_qk<T, kHeadDim, 0, kSliceKeys, kBoxRows>(acc_s, lane_k + first * kRowBytes, load_q);
    if (!tile::contains_all(mask.every_row(first_row, last_row), n0, kSliceKeys))
      apply_mask(acc_s, mask, first_row + lane_idx / 4, n0, lane_idx);
    std::uint32_t rP[kRowTiles][kSliceKeys / 16][4];
    softmax.template first_probabilities<T, 0, kSliceKeys>(acc_s, scale_log2, false, rP, acc_o);
    multiply_pv<T, kHeadDim, 0, kSliceKeys, kBoxRows>(acc_o, rP, lane_v + first * kRowBytes);
  }
}

// Calls attend(n, integral_constant<Walk>) for all tiles, from the last to the first. `again()`:
// the tiles once more, where it takes fewer registers to work out than to keep which of them are
// edges while those are walked.
template <typename Attend, typename Again>
__device__ __forceinline__ void walk_tiles(const TileRange& tiles, const Attend& attend,
                                           const Again& again) {
  constexpr std::integral_constant<Walk, Walk::kEdge> kEdge{};
  constexpr std::integral_constant<Walk, Walk::kFull> kFull{};
  for (int n = tiles.end - 1; n >= tiles.begin; --n) {
    const TileRange same = again();
    if (n < same.full_end) {
#pragma unroll 1
      for (; n >= same.full_begin; --n) attend(n, kFull);
      if (n < tiles.begin) break;
    }
    attend(n, kEdge);
  }
}

}  // namespace dlattn::wmma
