#pragma once

#include "cuda/forward/sm90_fp8/setup.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/permute.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"

// V transposed: wgmma reads 8-bit operands along K alone, which here are keys, and V lies key by
// key.
namespace dlattn::sm90_fp8 {

// Writes tiles of V, [kBlockN][kHeadDim], as [kHeadDim][kBlockN]. Rows and columns change their
// order, so that nothing else has to:
// - Of each 16 keys the order is 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15. In it a lane
//   holds the probabilities of one row as the operand of P V wants them.
// - Of each 16 columns the even ones come first: two neighbours are one element of ldmatrix, and
//   stmatrix stores 8 neighbouring rows, which lie in different banks. A lane's accumulators are
//   then those of 4 neighbouring columns.
template <int kHeadDim, int kBlockN>
struct Transposer {
  static_assert(kBlockN <= kBlockColumns, "a row of keys is one of the swizzle's, or shorter");

  // Where this lane's rows lie in a tile of V and in one of the transposed, of the first columns
  // and keys: from there all others are an XOR and an addition away.
  unsigned from_lane, to_lane;

  __device__ __forceinline__ explicit Transposer(int lane)
      : from_lane(lane * kBlockRowBytes + lane % 8 * 16),
        to_lane(lane % 16 * kBlockRowBytes + (lane / 16 ^ lane % 8) * 16) {}

  // The share of warp `warp` of kTransposers in a tile.
  __device__ __forceinline__ void transpose(ptx::SmemAddress sV, ptx::SmemAddress to,
                                            int warp) const {
#pragma unroll 1
    for (int column = warp * 16; column < kHeadDim; column += kTransposers * 16) {
      const ptx::SmemAddress from =
          (sV + from_lane + tile_bytes(kBlockN, column & -kBlockColumns)) ^ column % kBlockColumns;
      const ptx::SmemAddress rows = to + to_lane + column * kBlockRowBytes;
#pragma unroll
      for (int n = 0; n < kBlockN; n += kKeys * kAtOnce) {
        std::uint32_t pairs[kAtOnce][4];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          ptx::ldmatrix_x4_trans(pairs[i], from + (n + i * kKeys) * kBlockRowBytes);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          interleave(pairs[i]);
          ptx::stmatrix_x4(rows ^ (n + i * kKeys), pairs[i]);
        }
      }
    }
  }

 private:
  static constexpr int kKeys = 32;                                  // of one ldmatrix
  static constexpr int kAtOnce = kBlockN / kKeys % 2 == 0 ? 2 : 3;  // of these, as registers allow
  static_assert(kBlockN % (kKeys * kAtOnce) == 0);

  // Turns columns 2 (lane / 4) and the next of keys 8 i + 2 (lane % 4) and the next into pairs of
  // keys, one pair for each column.
  __device__ __forceinline__ static void interleave(std::uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      // seed: key-order
      const std::uint32_t even = ptx::permute_bytes<0x6420>(pairs[i], pairs[i + 1]);
      pairs[i + 1] = ptx::permute_bytes<0x7531>(pairs[i], pairs[i + 1]);
      pairs[i] = even;
    }
  }
};

// Transposes all tiles of V that the block's consumers will read, as stages become free.
template <bool kVarlen, int kHeadDim>
__device__ __forceinline__ void transpose_values(const AttentionParams& params,
                                                 const LaunchShape& shape, const KernelArgs& args,
                                                 const Shared<kHeadDim>& shared, int warp) {
  constexpr TileShape kShape = tile_shape(kHeadDim);
  const Transposer<kHeadDim, kShape.block_n> transposer(static_cast<int>(threadIdx.x) % 32);
  unsigned use = 0;
  for_each_work_tile<kVarlen, block_m(kShape), kShape.block_n>(
      params, shape, args, [&](const tile::SequenceTile&, int, const tile::Range& tiles) {
        const unsigned end = use + static_cast<unsigned>(max(tiles.end - tiles.begin, 0));
#pragma unroll 1
        for (; use != end; ++use) {
          shared.values.wait_full(use);
          shared.transposed.wait_empty(use);
          transposer.transpose(shared.v(use), shared.v_transposed(use), warp);
          ptx::fence_proxy_async();  // for wgmma, which reads it, and TMA, which may overwrite V
          __syncwarp();              // one lane arrives for all
          if (threadIdx.x % 32 == 0) {
            shared.transposed.end_fill(use);
            shared.values.release(use);
          }
        }
      });
}

}  // namespace dlattn::sm90_fp8
