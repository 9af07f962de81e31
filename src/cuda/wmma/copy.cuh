#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/swizzle.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::wmma {

// Which row of its source a row of a tile in shared memory holds: the same one.
struct RowsInOrder {
  __device__ __forceinline__ static int source(int row) { return row; }
  // source(row + rows) - source(row) for rows below `kStep` of TileCopy, and multiples of it.
  static constexpr int offset(int rows) { return rows; }
};

// For tiles of keys: of every 32 scores of a row that a lane quad has in accumulators, a lane's 8
// belong to neighbouring keys.
struct RowsByLane {
  __device__ __forceinline__ static int source(int row) {
    return row / 32 * 32 + row % 8 / 2 * 8 + row % 32 / 8 * 2 + row % 2;
  }
  static constexpr int offset(int rows) { return rows / 32 * 32 + rows % 32 / 8 * 2; }
};

// Copies of whole tiles from global to swizzled shared memory, 16 bytes each, by all threads of a
// block or, kGrouped, by a group of kThreads among several. A thread keeps to one chunk of one
// segment and walks down the rows in steps that leave its place in the swizzle as it is; the other
// segments of its row are immediate offsets away. Columns past `columns` are filled up with zeros.
template <typename T, int kColumns, int kThreads, bool kGrouped = false,
          typename Order = RowsInOrder>
struct TileCopy {
  using Rows = tile::SwizzledRows<kColumns>;
  static constexpr int kStep = kThreads / Rows::kChunks;  // rows from pass to pass
  static constexpr int kSegmentColumns = Rows::kSegmentBytes / 2;
  static_assert(sizeof(T) == 2 && kStep % 8 == 0);

  __device__ __forceinline__ static unsigned thread() {
    return kGrouped ? threadIdx.x % kThreads : threadIdx.x;
  }
  __device__ __forceinline__ static int first_row() { return thread() / Rows::kChunks; }
  __device__ __forceinline__ static int first_column() { return thread() % Rows::kChunks * 8; }
  // This thread's place in a tile, in bytes.
  __device__ __forceinline__ static int place() {
    return Rows::offset(first_row(), static_cast<int>(thread() % Rows::kChunks));
  }

  // Of kRows rows from `gmem` on, the first `rows` of which exist; the others are filled with
  // zeros.
  template <int kRows>
  __device__ __forceinline__ static void edge(ptx::SmemAddress smem, const T* gmem,
                                              std::int64_t row_stride, int rows, int columns) {
    static_assert(kRows % kStep == 0 || kStep % kRows == 0);
    if (kStep > kRows && first_row() >= kRows) return;
    const int source = Order::source(first_row());
    const T* from = gmem + source * row_stride + first_column();
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
      const bool exists = Order::offset(first) + source < rows;
      copy_row(smem + place() + first * Rows::kRowBytes, exists ? from : gmem,
               exists ? columns : 0);
      from += (Order::offset(first + kStep) - Order::offset(first)) * row_stride;
    }
  }

  // The same for rows that are aligned to `copy_bytes` of 8, 4 or 2: elements one by one then,
  // which are in shared memory at once. Rolled: registers are scarce, and this is no fast path.
  template <int kRows>
  __device__ __forceinline__ static void unaligned(unsigned char* smem, const T* gmem,
                                                   std::int64_t row_stride, int rows, int columns,
                                                   int copy_bytes) {
    const int count = copy_bytes / static_cast<int>(sizeof(T));
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < kRows; row += kThreads / 32) {
      const int source = Order::source(row);
#pragma unroll 1
      for (int column = threadIdx.x % 32 * count; column < kColumns; column += 32 * count) {
        const bool exists = source < rows && column < columns;
        const T* from = exists ? gmem + source * row_stride + column : gmem;
        unsigned char* to = smem + Rows::offset(row, column / 8) + column % 8 * 2;
        if (copy_bytes == 8) {
          ptx::cp_async<8>(to, from, exists);
        } else if (copy_bytes == 4) {
          ptx::cp_async<4>(to, from, exists);
        } else {
          *reinterpret_cast<T*>(to) = exists ? *from : tile::from_float<T>(0.0f);
        }
      }
    }
  }

  // The same with fewer instructions: what is filled with zeros has addresses all the same,
  // wherever they point.
  template <int kRows>
  __device__ __forceinline__ static void ragged(ptx::SmemAddress smem, const T* gmem,
                                                std::int64_t row_stride, int rows, int columns) {
    static_assert(kRows % kStep == 0 || kStep % kRows == 0);
    if (kStep > kRows && first_row() >= kRows) return;
    int rows_left[Rows::kSegments];  // from this thread's first on
#pragma unroll
    for (int s = 0; s < Rows::kSegments; ++s)
      rows_left[s] = first_column() + s * kSegmentColumns < columns ? rows - first_row() : 0;
    const T* from = gmem + first_row() * row_stride + first_column();
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
#pragma unroll
      for (int s = 0; s < Rows::kSegments; ++s) {
        ptx::cp_async<16>(smem + place() + first * Rows::kRowBytes + s * Rows::kSegmentBytes,
                          from + s * kSegmentColumns, first < rows_left[s]);
      }
      from += kStep * row_stride;
    }
  }

  // Of kRows rows that all exist. `from` is this thread's chunk of its last row of the tile, and is
  // left there for the tile before.
  template <int kRows>
  __device__ __forceinline__ static void whole(ptx::SmemAddress smem, const T*& from,
                                               std::int64_t row_stride, int columns) {
    constexpr int kLast = Order::offset(kRows - kStep);
#pragma unroll
    for (int first = kRows - kStep; first >= 0; first -= kStep) {
      copy_row(smem + place() + first * Rows::kRowBytes, from, columns);
      const int next = first > 0 ? Order::offset(first - kStep) : kLast - kRows;
      from -= (Order::offset(first) - next) * row_stride;
    }
  }

  // Where whole() begins in a tile of kRows rows that starts at row `row`, which need not exist.
  template <int kRows>
  __device__ __forceinline__ static const T* last_row(const T* gmem, std::int64_t row_stride,
                                                      int row) {
    return gmem + (row + Order::offset(kRows - kStep) + Order::source(first_row())) * row_stride +
           first_column();
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
