#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/forward/sm90/products.cuh"
#include "cuda/forward/sm90/setup.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/head_groups.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/wgmma/mask.cuh"

// Bias and mask: for each tile of scores TMA loads a tile of theirs to shared memory. Each consumer
// has its own tiles, which one thread of the producer's warpgroup loads for it.
namespace dlattn::sm90 {

// One consumer's tiles of bias and mask: stages as a Ring's, but one or two, as there is room.
struct BiasMaskTiles {
  const ScoreParams& params;
  ptx::SmemAddress base, tiles, mbarriers;
  unsigned use = 0;

  template <int kHeadDim, int kHeadDimV>
  __device__ __forceinline__
  BiasMaskTiles(const ScoreParams& params,
                const Shared<kHeadDim, kHeadDimV, Variant::kLoaded>& shared, int consumer)
      : params(params),
        base(shared.base),
        tiles(shared.base + shared.kMap.bias_mask + consumer * params.stages * params.stage_bytes),
        mbarriers(shared.bias_mask_mbarriers(consumer)) {}

  __device__ __forceinline__ ptx::SmemAddress bias() const {
    return tiles + stage() * params.stage_bytes;
  }
  __device__ __forceinline__ ptx::SmemAddress mask() const {
    return bias() + kBiasMaskRows * kBiasMaskKeys * params.bias_bytes;
  }

  // The producer's side.
  __device__ __forceinline__ ptx::SmemAddress begin_fill() const {
    ptx::mbarrier_sleep(empty(), parity() ^ 1);
    ptx::mbarrier_arrive_expect_tx(full(), params.stage_bytes);
    return full();
  }
  // The consumer's side, by all lanes.
  __device__ __forceinline__ void wait_full() const { ptx::mbarrier_sleep(full(), parity()); }
  __device__ __forceinline__ void release() {
    __syncwarp();  // one lane releases the tile for all
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty());
    ++use;
  }

 private:
  __device__ __forceinline__ unsigned stage() const { return use & (params.stages - 1); }
  __device__ __forceinline__ int parity() const {
    return static_cast<int>((params.stages == 2 ? use >> 1 : use) & 1);
  }
  __device__ __forceinline__ ptx::SmemAddress full() const {
    return mbarriers + stage() * ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress empty() const {
    return full() + kBiasMaskStages * ptx::kMbarrierBytes;
  }
};

// Stands in for them in kernels without bias and mask.
struct NoBiasMask {
  template <typename Shared>
  __device__ __forceinline__ NoBiasMask(const ScoreParams&, const Shared&, int) {}
  __device__ __forceinline__ void wait_full() const {}
  __device__ __forceinline__ void release() const {}
};
template <ScoreMod kScoreMod>
using BiasMaskSource =
    std::conditional_t<kScoreMod == ScoreMod::kBiasMask, BiasMaskTiles, NoBiasMask>;

// Starts the copies of a consumer's tiles, in the order of its walk.
template <int kHeadDim, int kHeadDimV>
__device__ __forceinline__ void produce_bias_mask(
    const AttentionParams& params, const LaunchShape& shape, const KernelArgs& args,
    const Shared<kHeadDim, kHeadDimV, Variant::kLoaded>& shared, int consumer) {
  constexpr int kBlockM = block_m(shared.kShape);
  constexpr int kWideColumns = kBlockRowBytes / 4;
  const tile::Mask mask = tile::wgmma::position_mask(params, shape, tile::fixed_lengths(params));
  const int seqlen_q = static_cast<int>(params.seqlen_q);
  const tile::RoundRobin scheduler{shape, args.num_work_tiles};
  BiasMaskTiles bias_mask(args.score, shared, consumer);
  for (unsigned round = 0;; ++round) {
    const unsigned index = scheduler.index(round);
    if (index >= scheduler.count) break;
    const tile::WorkTile work = tile::scheduled_tile(shape, args.heads, index);
    const int first_row = work.m_block * kBlockM + consumer * kWarpgroupRows;
    const int last_row = min(first_row + kWarpgroupRows, seqlen_q) - 1;
    const tile::Range tiles = tile::wgmma::visible_tiles(mask, first_row, last_row, kBiasMaskKeys);
    for (int n = tiles.end - 1; n >= tiles.begin; --n, ++bias_mask.use) {
      const ptx::SmemAddress full = bias_mask.begin_fill();
      const int n0 = n * kBiasMaskKeys;
      if (params.bias.data) {
        ptx::tma_load(bias_mask.bias(), args.bias, full, {n0, first_row, work.head, work.batch});
        if (args.score.bias_bytes == 4) {
          // seed: wide-bias
          ptx::tma_load(bias_mask.bias() + kBiasMaskRows * kBlockRowBytes, args.bias, full,
                        {n0 + kWideColumns, first_row, work.head, work.batch});
        }
      }
      if (params.mask.data)
        ptx::tma_load(bias_mask.mask(), args.mask, full, {n0, first_row, work.head, work.batch});
    }
  }
}

// Reads a value at an address that the compiler knows to be in shared memory.
template <typename X>
__device__ __forceinline__ X at_shared(ptx::SmemAddress base, ptx::SmemAddress address) {
  return *reinterpret_cast<const X*>(ptx::dynamic_smem() + (address - base));
}

// acc_s = acc_s * scale + bias, of a tile in T.
template <typename T, int kScores>
__device__ __forceinline__ void add_bias(float (&acc_s)[kScores], float scale,
                                         ptx::SmemAddress tile) {
  const ThreadIndex thread;
  const ptx::SmemAddress row =
      tile + swizzled_offset(thread.warp * 16 + thread.lane % 16, 0, kBiasMaskRows);
#pragma unroll
  for (int i = 0; i < kScores / 8; ++i) {
    std::uint32_t pairs[4];
    // Chunks of a row are told apart by the bits that the swizzle changes.
    ptx::ldmatrix_x4(pairs, row ^ ((2 * i + thread.lane / 16) * 16));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      T pair[2];
      memcpy(static_cast<void*>(pair), &pairs[e], sizeof pair);  // T has constructors
      float* s = acc_s + 8 * i + 2 * e;
      s[0] = fmaf(s[0], scale, tile::to_float(pair[0]));
      s[1] = fmaf(s[1], scale, tile::to_float(pair[1]));
    }
  }
}

// The same, of a tile in fp32: two blocks of half the keys.
template <int kScores>
__device__ __forceinline__ void add_wide_bias(float (&acc_s)[kScores], float scale,
                                              ptx::SmemAddress base, ptx::SmemAddress tile) {
  using Pair = tile::Vec<float, 2>;
  const ThreadIndex thread;
  const int row = thread.lane / 4, pair = thread.lane % 4;
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    const int chunk = (j % 4 * 2 + pair / 2) ^ row;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Pair bias = at_shared<Pair>(
          base, tile + (j / 4 * kBiasMaskRows + thread.warp * 16 + 8 * h + row) * kBlockRowBytes +
                    chunk * 16 + pair % 2 * 8);
      float* s = acc_s + 4 * j + 2 * h;
      s[0] = fmaf(s[0], scale, bias.x[0]);
      s[1] = fmaf(s[1], scale, bias.x[1]);
    }
  }
}

// Scores that the mask hides become -inf.
template <int kScores>
__device__ __forceinline__ void hide(float (&acc_s)[kScores], ptx::SmemAddress base,
                                     ptx::SmemAddress tile) {
  const ThreadIndex thread;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = thread.warp * 16 + 8 * h + thread.lane / 4;
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      // seed: mask-swizzle
      const auto visible = at_shared<std::uint16_t>(base, tile + row * kBiasMaskKeys +
                                                              ((j / 2) ^ (row / 2 % 4)) * 16 +
                                                              j % 2 * 8 + thread.lane % 4 * 2);
      float* s = acc_s + 4 * j + 2 * h;
      if ((visible & 0x00ff) == 0) s[0] = -INFINITY;
      if ((visible & 0xff00) == 0) s[1] = -INFINITY;
    }
  }
}

}  // namespace dlattn::sm90
