#pragma once

// Attention for small grids: few query rows per thread block, so that there are blocks enough for
// all SMs, and the keys divided among the block's warps.
//
// A block computes block_m query rows of one head. Its warps form key_groups groups of row_groups
// warps; tile n of the visible keys belongs to group (end - 1 - n) mod key_groups, and a warp has
// row_tiles x 16 of the rows, with its group's share of the output in registers. Groups share Q and
// nothing else until the end: each copies its own tiles, K and V in turn, into its own ring of
// slots, and has a barrier of its own. Per tile:
//   1. wait for K, barrier, start a copy into the slot read last; S = Q K^T, mask on edge tiles;
//   2. probabilities, packed as operands where they are (SpeculativeSoftmax);
//   3. wait for V, barrier, start a copy into the slot of K; O += P V.
// At the end every group leaves its part of the output in its slots and its rows' statistics beside
// them, and after one barrier all threads merge 8 columns of a row each, in the order of the
// groups. Shared memory: see SplitSmemMap. A barrier of a group both publishes the tile that has
// landed and frees the slot before; the first is the whole block's, for Q.

#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/wmma/copy.cuh"
#include "cuda/wmma/merge.cuh"
#include "cuda/wmma/products.cuh"
#include "cuda/wmma/softmax.cuh"
#include "cuda/wmma/split_traits.h"
#include "cuda/wmma/tiles.cuh"

namespace dlattn::wmma {

// The tiles of a group, walked from the last to the first.
template <int kKeyGroups>
struct GroupTiles {
  int first;
  int count;

  __device__ __forceinline__ GroupTiles(const TileRange& tiles, int group) {
    first = tiles.end - 1 - group;
    count = first < tiles.begin ? 0 : (first - tiles.begin) / kKeyGroups + 1;
  }
  __device__ __forceinline__ int tile(int i) const { return first - i * kKeyGroups; }
};

template <typename T, int kHeadDim, bool kPacked = false>
__global__ void __launch_bounds__(num_warps(split_shape(kHeadDim)) * 32,
                                  split_shape(kHeadDim).blocks_per_sm)
    split_kernel(const __grid_constant__ AttentionParams params,
                 const __grid_constant__ LaunchShape shape) {
  constexpr SplitShape kShape = split_shape(kHeadDim);
  constexpr SplitSmemMap kMap = split_smem_map(kHeadDim);
  constexpr int kRowTiles = kShape.row_tiles;
  constexpr int kBlockM = block_m(kShape);
  constexpr int kBlockN = kShape.block_n;
  constexpr int kSlots = kShape.slots;
  constexpr int kSlot = kBlockN * kHeadDim * 2;  // bytes
  constexpr int kGroupThreads = kShape.row_groups * 32;
  constexpr int kNumThreads = kShape.key_groups * kGroupThreads;
  using GroupCopy = TileCopy<T, kHeadDim, kGroupThreads, true>;

  const int group = threadIdx.x / kGroupThreads;
  const int lane_idx = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 % kShape.row_groups * kRowTiles * 16;
  const tile::Rows<kPacked> rows{shape};
  const tile::Work work = rows.work(blockIdx.x, params);
  const tile::Sequence<T> seq(params, shape, work);
  const int m0 = work.m_block * kBlockM;
  const int num_rows = rows.count(seq.seqlen_q);
  if (m0 >= num_rows) return;

  unsigned char* smem = ptx::dynamic_smem();
  const ptx::SmemAddress sQ = ptx::smem_address(smem) + kMap.q;
  const ptx::SmemAddress slots = ptx::smem_address(smem) + kMap.slots + group * kMap.group;
  const int head_dim = static_cast<int>(params.head_dim);
  const int head_dim_v = static_cast<int>(params.head_dim_v);
  const tile::RowMask<kPacked> mask(shape, seq.shift, seq.seqlen_k);
  const GroupTiles<kShape.key_groups> tiles(
      TileRange(mask, m0, min(m0 + kBlockM, num_rows) - 1, kBlockN), group);

  // Starts the copy of item `i` of the group, K or V of its tile i / 2, into a slot.
  const auto start_copy = [&](int i, auto is_v, ptx::SmemAddress slot) {
    const int n0 = tiles.tile(i / 2) * kBlockN;
    if (i / 2 < tiles.count) {
      const std::int64_t stride = is_v ? params.v_row_stride : params.k_row_stride;
      GroupCopy::template edge<kBlockN>(slot, (is_v ? seq.v : seq.k) + n0 * stride, stride,
                                        seq.seqlen_k - n0, is_v ? head_dim_v : head_dim);
    }
    ptx::cp_async_commit();
  };
  using QueryCopy = TileCopy<T, kHeadDim, kNumThreads>;
  if constexpr (kPacked) {
    const auto row_address = [&](int row) {
      return seq.q + rows.offset(m0 + row, params.q_row_stride, params.q_head_stride);
    };
    QueryCopy::template gather<kBlockM>(sQ, row_address, num_rows - m0, head_dim);
  } else {
    QueryCopy::template edge<kBlockM>(sQ, seq.q + m0 * params.q_row_stride, params.q_row_stride,
                                      num_rows - m0, head_dim);
  }
  for_each_slice(
      [&](auto i) { start_copy(i, std::integral_constant<bool, i % 2 == 1>{}, slots + i * kSlot); },
      std::make_integer_sequence<int, kSlots>{});

  // Where the results go, worked out while the copies are on their way.
  const tile::OutputRows<T> result(params, work);
  const float* sinks = params.sinks ? params.sinks + work.head * params.sinks_stride : nullptr;

  SpeculativeSoftmax<kRowTiles> softmax;
  float acc_o[kRowTiles][kHeadDim / 8][4] = {};
  std::uint32_t rQ[kHeadDim / 16][kRowTiles][4];
  ptx::cp_async_wait<kSlots - 1>();
  __syncthreads();
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16) {
    load_q<kHeadDim>(rQ[d / 16], sQ + warp_row * kHeadDim * 2 + lane_place_down<kHeadDim>(lane_idx),
                     d);
  }

  // Waits for the next item and starts the copy of the one that takes the slot before it.
  int slot = 0;  // of the item, in bytes
  const auto advance = [&](int next_item, auto is_v) {
    const int free = slot;
    slot = slot == (kSlots - 1) * kSlot ? 0 : slot + kSlot;
    ptx::cp_async_wait<kSlots - 2>();
    ptx::barrier_sync(1 + group, kGroupThreads);
    start_copy(next_item, is_v, slots + free);
  };
  using OddSlots = std::integral_constant<bool, kSlots % 2 == 1>;
  using EvenSlots = std::integral_constant<bool, kSlots % 2 == 0>;
#pragma unroll 1
  for (int i = 0; i < tiles.count; ++i) {
    if (i > 0) advance(2 * i - 1 + kSlots, EvenSlots{});
    float acc_s[kRowTiles][kBlockN / 8][4];
    multiply_qk<T, kHeadDim, kBlockN>(
        acc_s, slots + slot + lane_place_across<kHeadDim>(lane_idx),
        [&](std::uint32_t (&a)[kRowTiles][4], int d) { memcpy(a, rQ[d / 16], sizeof a); });
    const int n0 = tiles.tile(i) * kBlockN;
    const int first_row = m0 + warp_row;
    if (!tile::contains_all(mask.every_row(first_row, first_row + kRowTiles * 16 - 1), n0, kBlockN))
      apply_mask(acc_s, mask, first_row + lane_idx / 4, n0, lane_idx);
    std::uint32_t rP[kRowTiles][kBlockN / 16][4];
    if (i == 0) {
      softmax.template set_references<0, kBlockN>(acc_s, shape.scale_log2);
    } else {
      softmax.template raise_references<0, kBlockN>(acc_s, shape.scale_log2, acc_o);
    }
    softmax.template safe_probabilities<T, 0, kBlockN>(acc_s, shape.scale_log2, rP);
    advance(2 * i + kSlots, OddSlots{});
    multiply_pv<T, kHeadDim, 0, kBlockN>(acc_o, rP,
                                         slots + slot + lane_place_down<kHeadDim>(lane_idx));
  }

  constexpr int kPart = kBlockM * kHeadDim * 4;  // bytes
  static_assert(kPart <= kSlots * kSlot);
  // The last V stands in an odd slot if their number is even; everything else has been read.
  if (kSlots % 2 != 0 || kPart > kSlot) ptx::barrier_sync(1 + group, kGroupThreads);
  unsigned char* parts = smem + kMap.slots;
  store_part<kHeadDim>(parts + group * kMap.group, warp_row, acc_o, lane_idx);
  PartStats* stats = reinterpret_cast<PartStats*>(smem + kMap.stats);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const tile::OnlineSoftmax row = softmax.row(m, h);
      if (lane_idx % 4 == 0) {
        stats[group * kBlockM + warp_row + 16 * m + 8 * h + lane_idx / 4] = {row.row_max,
                                                                             row.row_sum};
      }
    }
  }
  __syncthreads();
  constexpr unsigned kUnits = kHeadDim / 8;  // of a row
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < kBlockM * kUnits; i += kNumThreads) {
    const int row = static_cast<int>(i / kUnits), unit = static_cast<int>(i % kUnits);
    if (m0 + row >= rows.count(result.seqlen_q)) break;
    const float* sink = sinks;
    if (kPacked && sink) sink += rows.head(m0 + row) * params.sinks_stride;
    const RowMerge<kShape.key_groups> merge(stats + row, kBlockM, sink);
    if (result.lse && unit == 0) {
      result.lse[rows.offset(m0 + row, 1, params.lse_head_stride)] =
          tile::finalize(merge.whole, sink).lse;
    }
    T* out_row = result.out + rows.offset(m0 + row, params.out_row_stride, params.out_head_stride);
    store_merged<T, kHeadDim>(out_row, merge, parts, kMap.group, row, unit, head_dim_v,
                              shape.store_bytes);
  }
}

}  // namespace dlattn::wmma
