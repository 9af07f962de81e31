#pragma once

#include <cstdint>

#include "cuda/tile/mma/partial_output.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/vec.cuh"

// How the groups of a thread block that divides the keys put their results together: each leaves
// its unnormalised fp32 output and its rows' statistics in shared memory, and then a warp merges 8
// rows, a share of the columns.
namespace dlattn::wmma {

// The sums of a row's parts.
template <int kParts>
struct RowMerge {
  float weights[kParts];      // out = sum of weight x part
  tile::OnlineSoftmax whole;  // of scores in base 2
  bool empty;                 // the row attends to nothing: out is 0 whatever the parts hold

  __device__ __forceinline__ RowMerge(const tile::mma::PartStats* stats, const float* sink) {
    float part[2 * kParts];
    tile::load(part, &stats->row_max);
#pragma unroll
    for (int g = 0; g < kParts; ++g) whole.row_max = fmaxf(whole.row_max, part[2 * g]);
#pragma unroll
    for (int g = 0; g < kParts; ++g) {
      weights[g] = whole.probability(part[2 * g], 1.0f);
      whole.row_sum = fmaf(weights[g], part[2 * g + 1], whole.row_sum);
    }
    const float scale = finalize(sink).scale;
#pragma unroll
    for (int g = 0; g < kParts; ++g) weights[g] *= scale;
    empty = scale == 0.0f;
  }

  __device__ __forceinline__ tile::RowResult finalize(const float* sink) const {
    return tile::finalize(tile::RowMax(-whole.row_max, false), 1.0f, whole.row_sum, sink);
  }
};

// A lane's columns of a row in all parts: kPairs pairs of column tiles.
template <int kParts, int kPairs>
struct RowParts {
  float x[kParts][kPairs][4];

  // `part` holds them in part 0; those of the next part are `part_bytes` further.
  __device__ __forceinline__ RowParts(const tile::mma::PartPair* part, int part_bytes, int lane) {
#pragma unroll
    for (int g = 0; g < kParts; ++g) {
      const auto* from = reinterpret_cast<const tile::mma::PartPair*>(
          reinterpret_cast<const unsigned char*>(part) + g * part_bytes);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) tile::load(x[g][i], from[i][lane].x);
    }
  }

  // Merges them in the order of the parts and stores them. `out` is where the row's first column
  // tile stands, from which on it has `columns`.
  template <typename T>
  __device__ __forceinline__ void store(T* out, const RowMerge<kParts>& merge, int columns,
                                        int store_bytes, int lane) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int g = 0; g < kParts; ++g) {
          low = fmaf(merge.weights[g], x[g][i][2 * e], low);
          high = fmaf(merge.weights[g], x[g][i][2 * e + 1], high);
        }
        const std::uint32_t pair = merge.empty ? 0 : tile::pack<T>(low, high);
        T* to = out + 16 * i + 8 * e + lane % 4 * 2;
        if (16 * i + 8 * e >= columns) continue;
        if (store_bytes >= 4) {
          *reinterpret_cast<std::uint32_t*>(to) = pair;
        } else {
          const T* elements = reinterpret_cast<const T*>(&pair);
          to[0] = elements[0], to[1] = elements[1];
        }
      }
    }
  }
};

}  // namespace dlattn::wmma
