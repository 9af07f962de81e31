#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/swizzle.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::tile {

// Copies kRows rows from `gmem` on to a tile of SwizzledRows, 16 bytes at a time, by all kThreads
// threads of a block. The first `rows` of them and the first `columns` of a row exist; the rest
// becomes zeros, without being read. A thread copies one chunk of each of its rows, which are kStep
// apart, so that the swizzle moves it alike in all of them. The copies are complete after a commit,
// a wait and a barrier.
template <int kRows, int kColumns, int kThreads, typename T>
__device__ __forceinline__ void copy_swizzled_rows(ptx::SmemAddress smem, const T* gmem,
                                                   std::int64_t row_stride, int rows, int columns) {
  using Rows = SwizzledRows<kColumns>;
  constexpr int kChunkColumns = 16 / static_cast<int>(sizeof(T));
  constexpr int kPerRow = kColumns / kChunkColumns;
  constexpr int kStep = kThreads / kPerRow;
  static_assert(kThreads % kPerRow == 0 && kStep % 8 == 0 && kRows % kStep == 0);
  const int first = static_cast<int>(threadIdx.x) / kPerRow;
  const int chunk = static_cast<int>(threadIdx.x) % kPerRow;
  const ptx::SmemAddress to = smem + Rows::offset(first, chunk);
  const T* from = gmem + first * row_stride + chunk * kChunkColumns;
  const int end = chunk * kChunkColumns < columns ? rows : 0;
#pragma unroll
  for (int row = 0; row < kRows; row += kStep) {
    ptx::cp_async<16>(to + row * Rows::kRowBytes, from, first + row < end);
    from += kStep * row_stride;
  }
}

// The same for rows of any alignment, element by element, without cp.async. Rolled: registers are
// scarce, and this is no fast path.
template <int kRows, int kColumns, int kThreads, typename T>
__device__ __forceinline__ void store_swizzled_rows(unsigned char* smem, const T* gmem,
                                                    std::int64_t row_stride, int rows,
                                                    int columns) {
  using Rows = SwizzledRows<kColumns>;
  constexpr int kChunkColumns = 16 / static_cast<int>(sizeof(T));
  constexpr int kPerRow = kColumns / kChunkColumns;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kPerRow; i += kThreads) {
    const int row = i / kPerRow, chunk = i % kPerRow;
    const T* from = gmem + row * row_stride + chunk * kChunkColumns;
    const int exist = row < rows ? columns - chunk * kChunkColumns : 0;
    Vec<T, kChunkColumns> x;
#pragma unroll
    for (int e = 0; e < kChunkColumns; ++e) x.x[e] = e < exist ? from[e] : from_float<T>(0.0f);
    *reinterpret_cast<Vec<T, kChunkColumns>*>(smem + Rows::offset(row, chunk)) = x;
  }
}

}  // namespace dlattn::tile
