#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/swizzle.cuh"

namespace dlattn::wmma {

// Copies of whole tiles from global to swizzled shared memory, 16 bytes each, by all threads of a
// block or, kGrouped, by a group of kThreads among several. A thread keeps to one chunk of one
// segment and walks down the rows in steps that leave its place in the swizzle as it is; the other
// segments of its row are immediate offsets away. Columns past `columns` are filled up with zeros.
template <typename T, int kColumns, int kThreads, bool kGrouped = false>
struct TileCopy {
  using Rows = tile::SwizzledRows<kColumns>;
  static constexpr int kStep = kThreads / Rows::kChunks;  // rows from pass to pass
  static constexpr int kSegmentColumns = Rows::kSegmentBytes / 2;
  static_assert(sizeof(T) == 2 && kStep % 8 == 0);

  __device__ __forceinline__ static int thread() {
    return kGrouped ? threadIdx.x % kThreads : threadIdx.x;
  }
  __device__ __forceinline__ static int first_row() { return thread() / Rows::kChunks; }
  __device__ __forceinline__ static int first_column() { return thread() % Rows::kChunks * 8; }
  // This thread's place in a tile, in bytes.
  __device__ __forceinline__ static int place() {
    return Rows::offset(first_row(), thread() % Rows::kChunks);
  }

  // Of kRows rows from `gmem` on, the first `rows` of which exist; the others are filled with
  // zeros.
  template <int kRows>
  __device__ __forceinline__ static void edge(ptx::SmemAddress smem, const T* gmem,
                                              std::int64_t row_stride, int rows, int columns) {
    static_assert(kRows % kStep == 0 || kStep % kRows == 0);
    if (kStep > kRows && first_row() >= kRows) return;
    const T* from = gmem + first_row() * row_stride + first_column();
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
      const bool exists = first + first_row() < rows;
      copy_row(smem + place() + first * Rows::kRowBytes, exists ? from : gmem,
               exists ? columns : 0);
      from += kStep * row_stride;
    }
  }

  // Of kRows rows that all exist. `from` is this thread's chunk of its last row of the tile, and is
  // left there for the tile before.
  template <int kRows>
  __device__ __forceinline__ static void whole(ptx::SmemAddress smem, const T*& from,
                                               std::int64_t row_stride, int columns) {
#pragma unroll
    for (int first = kRows - kStep; first >= 0; first -= kStep) {
      copy_row(smem + place() + first * Rows::kRowBytes, from, columns);
      from -= kStep * row_stride;
    }
  }

  // Where whole() begins in a tile of kRows rows that starts at row `row`, which need not exist.
  template <int kRows>
  __device__ __forceinline__ static const T* last_row(const T* gmem, std::int64_t row_stride,
                                                      int row) {
    return gmem + (row + kRows - kStep + first_row()) * row_stride + first_column();
  }

 private:
  __device__ __forceinline__ static void copy_row(ptx::SmemAddress smem, const T* from,
                                                  int columns) {
#pragma unroll
    for (int s = 0; s < Rows::kSegments; ++s) {
      ptx::cp_async<16>(smem + s * Rows::kSegmentBytes, from + s * kSegmentColumns,
                        first_column() + s * kSegmentColumns < columns);
    }
  }
};

}  // namespace dlattn::wmma
