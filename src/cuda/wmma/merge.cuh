#pragma once

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/vec.cuh"

// How the groups of a thread block that divides the keys put their results together: each leaves
// its unnormalised fp32 output and its rows' statistics in shared memory, and all threads merge.
namespace dlattn::wmma {

// Of one row in one group, to be stored as one access.
struct alignas(8) PartStats {
  float row_max;  // what the group's output is relative to; -inf: it saw nothing
  float row_sum;
};

// Rows of kColumns fp32 in shared memory. A row is made of units of 8 columns (two pieces of 16
// bytes) whose places are XORed with the row's number, so that 4 rows of one unit, which half a
// warp stores, lie in different banks; and the pieces of every other 4 units change places, so that
// the first pieces of 8 units, which a quarter of a warp loads, do too.
template <int kColumns>
struct PartRows {
  static_assert(kColumns % 32 == 0, "units are permuted in fours");
  static constexpr int kRowBytes = kColumns * 4;

  // Bytes from the start to columns 8 unit + 4 piece .. + 3 of a row.
  __device__ __forceinline__ static int offset(int row, int unit, int piece) {
    return row * kRowBytes + (unit ^ row % 4) * 32 + (piece ^ unit / 4 % 2) * 16;
  }
};

// Stores the output of a warp's rows, from row `first_row` of the part on.
template <int kHeadDim, int kRowTiles>
__device__ __forceinline__ void store_part(unsigned char* part, int first_row,
                                           const float (&acc_o)[kRowTiles][kHeadDim / 8][4],
                                           int lane) {
  using Rows = PartRows<kHeadDim>;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 16 * m + 8 * h + lane / 4;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const float pair[2] = {acc_o[m][j][2 * h], acc_o[m][j][2 * h + 1]};
        unsigned char* to = part + Rows::offset(row, j, lane % 4 / 2) + lane % 2 * 8;
        tile::store(reinterpret_cast<float*>(to), pair);
      }
    }
  }
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

// Columns 8 unit .. + 7 of a row of the output: the parts, `part_bytes` apart, in their order.
template <typename T, int kHeadDim, int kParts>
__device__ __forceinline__ void store_merged(T* out_row, const RowMerge<kParts>& merge,
                                             const unsigned char* parts, int part_bytes, int row,
                                             int unit, int columns, int store_bytes) {
  using Rows = PartRows<kHeadDim>;
  float x[8] = {};
#pragma unroll
  for (int g = 0; g < kParts; ++g) {
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const unsigned char* from = parts + g * part_bytes + Rows::offset(row, unit, piece);
      float of_part[4];
      tile::load(of_part, reinterpret_cast<const float*>(from));
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[4 * piece + e] = fmaf(merge.weights[g], of_part[e], x[4 * piece + e]);
    }
  }
  if (8 * unit >= columns) return;
  tile::Vec<T, 8> chunk;
#pragma unroll
  for (int e = 0; e < 8; ++e) chunk.x[e] = tile::from_float<T>(merge.empty ? 0.0f : x[e]);
  T* to = out_row + 8 * unit;
  if (store_bytes == 16) {
    *reinterpret_cast<tile::Vec<T, 8>*>(to) = chunk;
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) to[e] = chunk.x[e];
  }
}

}  // namespace dlattn::wmma
