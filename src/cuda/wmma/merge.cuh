#pragma once

#include <cstring>

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/vec.cuh"

// How the groups of a thread block that divides the keys put their results together: each leaves
// its unnormalised fp32 output and its rows' statistics in shared memory, and then each merges a
// share of the columns.
namespace dlattn::wmma {

// Of one row in one group, to be stored as one access.
struct alignas(8) PartStats {
  float row_max;  // what the group's output is relative to; -inf: it saw nothing
  float row_sum;
};

// A warp's accumulators of 16 rows by 8 columns in shared memory: as they are, so that both those
// who store and those who load touch 16 bytes per lane, one behind the other.
using PartTile = tile::Vec<float, 4>[32];

// Stores the output of a warp's rows, kTiles tiles.
template <int kTiles>
__device__ __forceinline__ void store_part(PartTile* part, const float (&acc_o)[kTiles][4],
                                           int lane) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) tile::store(part[j][lane].x, acc_o[j]);
}

// What a row's parts add up to.
template <int kParts>
struct RowMerge {
  float weights[kParts];  // out = sum of weight x part
  tile::OnlineSoftmax whole;
  bool empty;  // the row attends to nothing: out is 0 whatever the parts hold

  // `stats` holds the row's statistics in part 0; those of the next part are `stride` further.
  __device__ __forceinline__ RowMerge(const PartStats* stats, int stride, const float* sink) {
    PartStats part[kParts];
#pragma unroll
    for (int g = 0; g < kParts; ++g) {
      part[g] = stats[g * stride];
      whole.row_max = fmaxf(whole.row_max, part[g].row_max);
    }
#pragma unroll
    for (int g = 0; g < kParts; ++g) {
      weights[g] = whole.probability(part[g].row_max);
      whole.row_sum = fmaf(weights[g], part[g].row_sum, whole.row_sum);
    }
    const float scale = tile::finalize(whole, sink).scale;
#pragma unroll
    for (int g = 0; g < kParts; ++g) weights[g] *= scale;
    empty = scale == 0.0f;
  }
};

// kTiles tiles of a warp's rows in all parts, a group's parts being `part_bytes` apart.
template <int kParts, int kTiles>
struct MergeTiles {
  float x[kParts][kTiles][4];

  __device__ __forceinline__ MergeTiles(const PartTile* first_part, int part_bytes, int lane) {
#pragma unroll
    for (int g = 0; g < kParts; ++g) {
      const PartTile* part = reinterpret_cast<const PartTile*>(
          reinterpret_cast<const unsigned char*>(first_part) + g * part_bytes);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) tile::load(x[g][j], part[j][lane].x);
    }
  }

  // Merges and stores this lane's columns of a row, h = 0 or 1 of the lane's two, in the order of
  // the parts. `out` stands at column 0 of the first tile, of which `columns` exist.
  template <typename T>
  __device__ __forceinline__ void store_row(T* out, int h, const RowMerge<kParts>& merge,
                                            int columns, int store_bytes, int lane) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (8 * j >= columns) break;
      float low = 0.0f, high = 0.0f;
#pragma unroll
      for (int g = 0; g < kParts; ++g) {
        low = fmaf(merge.weights[g], x[g][j][2 * h], low);
        high = fmaf(merge.weights[g], x[g][j][2 * h + 1], high);
      }
      const std::uint32_t pair = merge.empty ? 0 : tile::pack<T>(low, high);
      T* to = out + 8 * j + lane % 4 * 2;
      if (store_bytes >= 4) {
        *reinterpret_cast<std::uint32_t*>(to) = pair;
      } else {
        T elements[2];
        memcpy(elements, &pair, sizeof pair);
        to[0] = elements[0], to[1] = elements[1];
      }
    }
  }
};

}  // namespace dlattn::wmma
