#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/vec.cuh"

// Rows from global to shared memory, by all threads of a block. Nothing past `rows` or `columns` is
// read: the tile is filled up with zeros, which matters, since 0 x garbage may be NaN.
namespace dlattn::tile {

// A tile of kRows x kColumns elements of T in shared memory, kLd elements from row to row, copied
// by kThreads threads.
template <typename T, int kRows, int kColumns, int kLd, int kThreads>
struct RowCopy {
  T* smem;
  const T* gmem;
  std::int64_t row_stride;
  int rows;     // of gmem; may be more than kRows
  int columns;  // of gmem, at most kColumns

  // 16 bytes each. A thread stays in its column and walks down the rows by a running pointer: with
  // an address computed per row, the compiler keeps them all in registers for as long as the kernel
  // runs.
  __device__ __forceinline__ void wide() const {
    constexpr int kCount = 16 / static_cast<int>(sizeof(T));
    constexpr int kPerRow = kColumns / kCount;
    constexpr int kStep = kThreads / kPerRow;
    const int first = threadIdx.x / kPerRow;
    const int column = threadIdx.x % kPerRow * kCount;
    if (kThreads % kPerRow != 0 && first >= kStep) return;
    const int end = column < columns ? rows : 0;
    const T* from = gmem + first * row_stride + column;
    T* to = smem + first * kLd + column;
#pragma unroll
    for (int i = 0; i < (kRows + kStep - 1) / kStep; ++i) {
      const int row = first + i * kStep;
      if (kRows % kStep == 0 || row < kRows) {
        // seed: copy-row
        ptx::cp_async<16>(to + i * kStep * kLd, row < end ? from : gmem, row < end);
      }
      from += kStep * row_stride;
    }
  }

  // 8 bytes, 4 bytes or one element each, rolled for the same reason. A warp takes a row.
  __device__ __forceinline__ void narrow(int copy_bytes) const {
    const int count = copy_bytes / static_cast<int>(sizeof(T));
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < kRows; row += kThreads / 32) {
#pragma unroll 1
      for (int column = threadIdx.x % 32 * count; column < kColumns; column += 32 * count) {
        const bool valid = row < rows && column < columns;
        const T* from = valid ? gmem + row * row_stride + column : gmem;
        T* to = smem + row * kLd + column;
        if (copy_bytes == 8) {
          ptx::cp_async<8>(to, from, valid);
        } else if (copy_bytes == 4) {
          ptx::cp_async<4>(to, from, valid);
        } else {
          *to = valid ? *from : from_float<T>(0.0f);
        }
      }
    }
  }
};

// Issues the copies. They are complete after cp_async_commit, a wait and a barrier. `copy_bytes`
// divides every address, row stride and row length involved.
template <int kRows, int kColumns, int kLd, int kThreads, typename T>
__device__ __forceinline__ void copy_rows(T* smem, const T* gmem, std::int64_t row_stride, int rows,
                                          int columns, int copy_bytes) {
  const RowCopy<T, kRows, kColumns, kLd, kThreads> copy{smem, gmem, row_stride, rows, columns};
  if (copy_bytes == 16) {
    copy.wide();
  } else {
    copy.narrow(copy_bytes);
  }
}

}  // namespace dlattn::tile
