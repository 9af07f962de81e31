#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/vec.cuh"

// Rows from global to shared memory, by all threads of a block. Nothing past `rows` or `columns` is read: the tile is
// filled up with zeros, which matters, since 0 x garbage may be NaN.
namespace dlattn::tile {

// A tile of kRows x kColumns elements of T in shared memory, kLd elements from row to row, copied by kThreads threads.
template <typename T, int kRows, int kColumns, int kLd, int kThreads>
struct RowCopy {
  T* smem;
  const T* gmem;
  std::int64_t row_stride;
  int rows;     // of gmem; may be more than kRows
  int columns;  // of gmem, at most kColumns

  template <int kBytes>
  __device__ __forceinline__ void async() const {
    constexpr int kCount = kBytes / static_cast<int>(sizeof(T));
    constexpr int kPerRow = kColumns / kCount;
    static_assert(kRows * kPerRow % kThreads == 0, "every thread copies equally often");
    constexpr int kUnroll = kBytes == 16 ? 8 : 1;
#pragma unroll kUnroll
    for (int i = threadIdx.x; i < kRows * kPerRow; i += kThreads) {
      const int row = i / kPerRow;
      const int column = i % kPerRow * kCount;
      const bool valid = row < rows && column < columns;
      const T* from = valid ? gmem + row * row_stride + column : gmem;
      ptx::cp_async<kBytes>(smem + row * kLd + column, from, valid);
    }
  }

  // Element by element, for rows that are not aligned to 4 bytes.
  __device__ __forceinline__ void plain() const {
#pragma unroll 4
    for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
      const int row = i / kColumns;
      const int column = i % kColumns;
      const bool valid = row < rows && column < columns;
      smem[row * kLd + column] = valid ? gmem[row * row_stride + column] : from_float<T>(0.0f);
    }
  }
};

// Issues the copies. They are complete after cp_async_commit, a wait and a barrier. `copy_bytes` divides every address,
// row stride and row length involved.
template <int kRows, int kColumns, int kLd, int kThreads, typename T>
__device__ __forceinline__ void copy_rows(T* smem, const T* gmem, std::int64_t row_stride, int rows, int columns,
                                          int copy_bytes) {
  const RowCopy<T, kRows, kColumns, kLd, kThreads> copy{smem, gmem, row_stride, rows, columns};
  if (copy_bytes == 16) {
    copy.template async<16>();
  } else if (copy_bytes == 8) {
    copy.template async<8>();
  } else if (copy_bytes == 4) {
    copy.template async<4>();
  } else {
    copy.plain();
  }
}

}  // namespace dlattn::tile
