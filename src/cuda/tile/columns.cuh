#pragma once

#include "cuda/tile/epilogue.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::tile {

// How the lanes of a warp share the columns of an accumulator that is kHeadDim wide, in kernels
// whose P V runs on CUDA cores: a lane owns kChunks chunks of kVecSize adjacent columns. A chunk is
// one aligned shared-memory access, and neighbouring lanes own neighbouring chunks.
template <typename T, int kHeadDim>
struct LaneColumns {
  static constexpr int kCount = kHeadDim / 32;
  static constexpr int kMaxVecSize = 16 / static_cast<int>(sizeof(T));
  static constexpr int kVecSize = kCount % kMaxVecSize == 0 ? kMaxVecSize
                                  : kCount % 4 == 0         ? 4
                                  : kCount % 2 == 0         ? 2
                                                            : 1;
  static constexpr int kChunks = kCount / kVecSize;
  static_assert(kHeadDim % 32 == 0 && kVecSize <= kMaxVecSize);

  __device__ __forceinline__ static int first_column(int chunk, int lane) {
    return (chunk * 32 + lane) * kVecSize;
  }

  // This lane's columns of a row of V.
  __device__ __forceinline__ static void load_row(float (&x)[kChunks][kVecSize], const T* row,
                                                  int lane) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) load(x[c], row + first_column(c, lane));
  }

  __device__ __forceinline__ static void store_row(T* out_row,
                                                   const float (&acc)[kChunks][kVecSize], int lane,
                                                   float scale, int columns, int store_bytes) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      store_columns(out_row, first_column(c, lane), acc[c], scale, columns, store_bytes);
    }
  }
};

// acc[row] += p[row][key] * v[key] for kRows rows and the kBlockN keys of a tile. `p` is fp32 with
// kLdP floats from row to row, read as broadcasts of kKeys keys; `v` has kLdV elements from row to
// row.
template <int kRows, int kBlockN, int kLdP, int kLdV, typename T, int kChunks, int kVecSize>
__device__ __forceinline__ void accumulate_pv(float (&acc)[kRows][kChunks][kVecSize],
                                              const float* p, const T* v, int lane) {
  using Columns = LaneColumns<T, 32 * kChunks * kVecSize>;
  static_assert(Columns::kVecSize == kVecSize);
  constexpr int kKeys =
      kChunks * kVecSize > 4 ? 2 : 4;  // per step; wide rows leave V fewer registers
#pragma unroll 1
  for (int n = 0; n < kBlockN; n += kKeys) {
    float rV[kKeys][kChunks][kVecSize];
#pragma unroll
    for (int j = 0; j < kKeys; ++j) Columns::load_row(rV[j], v + (n + j) * kLdV, lane);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float rP[kKeys];
      load(rP, p + r * kLdP + n);
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
#pragma unroll
          for (int e = 0; e < kVecSize; ++e) acc[r][c][e] += rP[j] * rV[j][c][e];
        }
      }
    }
  }
}

}  // namespace dlattn::tile
