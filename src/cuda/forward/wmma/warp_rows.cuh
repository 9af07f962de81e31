#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/forward/wmma/traits.h"
#include "cuda/tile/mma/mask.cuh"
#include "cuda/tile/mma/products.cuh"
#include "cuda/tile/mma/softmax.cuh"

namespace dlattn::wmma {

// A warp's query rows: Q, the softmax of each row and the unnormalised output, and how a tile of
// keys updates them. The consumer that owns them knows where the tile is in shared memory: lane_k()
// and lane_v() are the addresses of its K and V for this lane's ldmatrix (products.cuh).
//
// They are no members of the consumer: nvcc splits a struct into registers only when all loops over
// its arrays are unrolled, and that is too late to optimise a consumer's scalars in the same
// struct.
template <typename T, int kHeadDim, int kVariant>
struct WarpRows {
  static constexpr TileShape kShape = tile_shape(kHeadDim, kVariant);
  static constexpr int kRowTiles = kShape.row_tiles;
  static constexpr int kRows = kRowTiles * 16;
  static constexpr int kBytes = kRows * kHeadDim * static_cast<int>(sizeof(T));  // Q's
  static constexpr int kBlockN = kShape.block_n;
  static constexpr bool kInRegisters = kShape.query_location != QueryLocation::kSmem;
  // Rows of a box of Q, and of one of K or V (tile::SwizzledRows).
  static constexpr int kQueryBox = uses_tma(kHeadDim, kVariant) ? kRows : 0;
  static constexpr int kKeyBox = uses_tma(kHeadDim, kVariant) ? kBlockN : 0;

  tile::mma::SpeculativeSoftmax<kRowTiles> softmax;
  float acc_o[kRowTiles][kHeadDim / 8][4] = {};
  std::uint32_t rQ[kHeadDim / 16][kRowTiles][4];  // if kInRegisters
  const ptx::SmemAddress lane_q;

  // `sQ`: the address of the warp's rows of Q in shared memory.
  __device__ __forceinline__ WarpRows(ptx::SmemAddress sQ, int lane)
      : lane_q(sQ + tile::mma::lane_offset_down<kHeadDim, kQueryBox>(lane)) {}

  __device__ __forceinline__ void load_queries() {
    static_assert(kInRegisters);
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16)
      tile::mma::load_q<kHeadDim, kQueryBox>(rQ[d / 16], lane_q, d);
  }

  // S = Q K^T for the first kKeys keys from `lane_k` on.
  template <int kKeys>
  __device__ __forceinline__ void multiply_keys(float (&acc_s)[kRowTiles][kKeys / 8][4],
                                                ptx::SmemAddress lane_k) const {
    tile::mma::multiply_qk<T, kHeadDim, 0, kKeys, kKeyBox>(
        acc_s, lane_k, [this](std::uint32_t (&a)[kRowTiles][4], int d) {
          if constexpr (kInRegisters) {
            memcpy(a, rQ[d / 16], sizeof a);
          } else {
            tile::mma::load_q<kHeadDim, kQueryBox>(a, lane_q, d);
          }
        });
  }

  // Updates the rows with a full tile, in slices of its keys. Returns how many keys it has done,
  // from the first on: fewer than kBlockN where the speculative row max overflowed. Calls
  // consumer.after_softmax() once, after the first slice's probabilities.
  template <typename Consumer>
  __device__ __forceinline__ int attend(Consumer& consumer, float scale_log2) {
    float acc_s[kRowTiles][kBlockN / 8][4];
    // S = Q K^T
    multiply_keys<kBlockN>(acc_s, consumer.lane_k());
    int keys = 0;
    attend_slices<0>(acc_s, consumer, scale_log2, keys);
    return keys;
  }

  // Updates the rows, `first_row` and on, with the keys of tile `n` from its key `begin` on, in
  // slices of kShape.edge_keys. Leaves out slices that none of the rows sees. Raises the row max
  // before it computes probabilities.
  template <typename Mask>
  __device__ __forceinline__ void attend_edge(const Mask& mask, int first_row, int n, int begin,
                                              ptx::SmemAddress lane_k, ptx::SmemAddress lane_v,
                                              float scale_log2, int lane_idx) {
    constexpr int kSliceKeys = kShape.edge_keys;
    constexpr int kRowBytes = tile::SwizzledRows<kHeadDim, kKeyBox>::kRowBytes;
    const int last_row = first_row + kRows - 1;
#pragma unroll 1
    for (int first = kBlockN - kSliceKeys; first + kSliceKeys > begin; first -= kSliceKeys) {
      const int n0 = n * kBlockN + first;
      const tile::Range any = mask.any_row(first_row, last_row);
      if (any.begin >= n0 + kSliceKeys || any.end <= n0) continue;
      // S = Q K^T
      float acc_s[kRowTiles][kSliceKeys / 8][4];
      multiply_keys<kSliceKeys>(acc_s, lane_k + first * kRowBytes);
      if (!tile::contains_all(mask.every_row(first_row, last_row), n0, kSliceKeys))
        tile::mma::apply_mask(acc_s, mask, first_row + lane_idx / 4, n0, lane_idx);
      if (first < begin) hide_keys(acc_s, begin - first, lane_idx);
      // P = exp(S - row max)
      std::uint32_t rP[kRowTiles][kSliceKeys / 16][4];
      softmax.template first_probabilities<T, 0, kSliceKeys>(acc_s, scale_log2, false, rP, acc_o);
      // O += P V
      tile::mma::multiply_pv<T, kHeadDim, 0, kSliceKeys, kKeyBox>(acc_o, rP,
                                                                  lane_v + first * kRowBytes);
    }
  }

 private:
  // Updates the rows with the slices from kSlice on, until the row max overflows in one. A slice
  // calls the next, so that in machine code an overflow is one jump, and products overlap with the
  // next slice's exponentials. A loop over functions that may return false would become flags that
  // are tested after the products.
  template <int kSlice, typename Consumer>
  __device__ __forceinline__ void attend_slices(float (&acc_s)[kRowTiles][kBlockN / 8][4],
                                                Consumer& consumer, float scale_log2, int& keys) {
    constexpr int kKeys = kBlockN / kShape.slices;
    constexpr int kFirst = kSlice * kKeys;
    // P = exp(S - row max)
    if (!softmax.template speculate<kFirst, kKeys>(acc_s, scale_log2, acc_o)) return;
    std::uint32_t rP[kRowTiles][kKeys / 16][4];
    softmax.template pack<T, kFirst, kKeys>(acc_s, rP);
    if constexpr (kSlice == 0) consumer.after_softmax();
    // O += P V
    tile::mma::multiply_pv<T, kHeadDim, kFirst, kKeys, kKeyBox>(acc_o, rP, consumer.lane_v());
    keys = kFirst + kKeys;
    if constexpr (kFirst + kKeys < kBlockN)
      attend_slices<kSlice + 1>(acc_s, consumer, scale_log2, keys);
  }
};

}  // namespace dlattn::wmma
